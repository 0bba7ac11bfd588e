"""torchrun's processes on one machine: who they are, what is refused, where they meet, and the pair's answer."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock, call

import pytest
from runtime.gpu_doubles import pretend_gpus

from amusd.config import EngineConfig, HardwareConfig, RunConfig, TransportConfig
from amusd.errors import ConfigError
from amusd.transport.base import Rendezvous
from amusd.transport.factory import numbered_link
from amusd.types import Role
from launch.run import (
    DraftElsewhere,
    Place,
    compose,
    own_device,
    place_from_environment,
    start_drafts,
)
from tests.launch.processes import WAITING, run, torchrun_command
from tests.launch.small_pair import PROMPT, plain_answer, save_pair

DEADLINE_SECONDS = 30.0
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
TWO_NODES = "transport.address=tcp://10.0.0.1:29501"


def a_place(rank: int = 0, size: int = 2, *, local_size: int | None = None, local_rank: int | None = None) -> Place:
    here, number = size if local_size is None else local_size, rank if local_rank is None else local_rank
    return Place(rank, size, number, here)


def test_a_process_knows_its_place_from_torchrun_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    own = place_from_environment()
    assert (own.rank, own.size, own.is_apart) == (0, 2, True)
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigError, match="start it with torchrun --standalone --nproc-per-node=2"):
        place_from_environment()


@pytest.mark.parametrize(
    ("own", "arguments", "line"),
    [
        (a_place(), ["-m", "max_lookahead=1,2"], "^-m: a sweep starts its own pairs"),
        (a_place(), ["doctor"], "^doctor: under torchrun the command is one of generate, compare, serve$"),
        (a_place(size=1), ["prompt=a"], "^WORLD_SIZE=1: start 2 processes"),
        (a_place(size=3), ["target_tensor_parallel_size=3"], "^WORLD_SIZE=3: start 4 processes"),
        (a_place(local_size=1), ["prompt=a", "target_tensor_parallel_size=2"], "^WORLD_SIZE=2: start 3 processes"),
        (a_place(local_size=1), ["prompt=a", "transport.insecure=true"], "^transport.address: required on several"),
        (a_place(local_size=1), ["prompt=a", TWO_NODES], "not on this machine, and the link is neither encrypted nor"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_listens(own: Place, arguments: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as caught:
        compose(arguments, own)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("allowed", ["transport.insecure=true", "transport.keys=/keys"])
def test_several_machines_need_keys_or_a_word(allowed: str) -> None:
    command, config = compose(["compare", TWO_NODES, allowed], a_place(local_size=1))
    assert (command, config.transport.address) == ("compare", "tcp://10.0.0.1:29501")


@pytest.mark.parametrize(
    ("num_gpus", "named", "device"),
    [(4, "", "cuda:1"), (1, "", "cuda:0"), (0, "", "cpu"), (2, "cuda:1,cuda:0,cuda:1,cpu", "cuda:1")],
)
def test_each_machine_gives_its_own_gpus_to_its_ranks(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, named: str, device: str
) -> None:
    pretend_gpus(monkeypatch, num_gpus)
    hardware = HardwareConfig(devices=tuple(named.split(",")) if named else ())
    config = RunConfig(target_tensor_parallel_size=3, hardware=hardware)
    assert own_device(config, a_place(2, 4, local_rank=1)) == device


def test_the_last_rank_starts_drafts_as_rank_0_says_and_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process = Mock()
    process.tell.side_effect = lambda *_: process.ending.configure_mock(return_value=None)
    process.dismiss.side_effect = lambda: process.ending.configure_mock(return_value="it was dismissed")
    monkeypatch.setattr("launch.run.DraftProcess", lambda *_, **__: process)
    here, there = (
        numbered_link(TransportConfig(), str(tmp_path), 1, Role.DRAFT, listens=listens) for listens in (True, False)
    )
    drafts = DraftElsewhere(here)
    told = [(number, Rendezvous(f"ipc:///{number}", number)) for number in (1, 2)]
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(start_drafts, EngineConfig(), there)
        drafts.tell(*told[0])
        assert drafts.ending(0.1) is None
        drafts.dismiss()
        assert drafts.ending(DEADLINE_SECONDS) == drafts.ending(0.0) == "it was dismissed"
        drafts.tell(*told[1])
        assert drafts.ending(0.1) is None, "what is known is of the first one"
        drafts.stop()
        last.result(DEADLINE_SECONDS)
    there.close()
    assert process.tell.call_args_list == [call(*one) for one in told]
    process.stop.assert_called_once_with()


@pytest.mark.timeout(200)
def test_two_ranks_and_a_draft_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    pair = save_pair(tmp_path)
    arguments = ["target_tensor_parallel_size=2", *WAITING, f"prompt={PROMPT}", "output=json", "run_dir=out"]
    line = torchrun_command(*pair, *arguments, "sampling.max_new_tokens=24", num_processes=3)
    done = run(line, tmp_path)
    assert done.returncode == 0, done.stderr
    together = json.loads(done.stdout)
    expected = plain_answer(pair, 24)
    assert tuple(together["token_ids"]) == expected
    assert len(set(expected)) > 5, "this answer is too simple to tell models apart"
    assert together["mode"] == "asynchronous"
    assert together["metrics"]["num_draft_tokens"] > 0
    assert {path.name for path in (tmp_path / "out" / "events").iterdir()} == {"target.jsonl", "draft.jsonl"}
    workers = json.loads((tmp_path / "out" / "workers.json").read_text())
    assert (len(workers["target"]), len(workers["draft"])) == (2, 1)
