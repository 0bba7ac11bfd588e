"""torchrun's processes on one machine: their roles, refusals, meeting place, and the pair's answer."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from lines import logged, refusal
from runtime.gpu_doubles import pretend_gpus
from torch.distributed import HashStore

import launch.run
from amusd.config import HardwareConfig, RunConfig, TransportConfig
from amusd.errors import ConfigError
from amusd.runtime.workers import Rendezvous
from amusd.transport.addresses import address_towards, check_address
from launch.run import RankInfo, compose, own_device, rank_info, rendezvous_in
from tests.launch.processes import BLOCKS, SECONDS, WAITING, begun, descendants, run, torchrun_command
from tests.launch.small_pair import PROMPT, plain_answer

DEADLINE_SECONDS = 30.0
TWO_NODES = "transport.address=tcp://10.0.0.1:29501"


def a_rank(rank: int = 0, size: int = 2, *, local_size: int | None = None, local_rank: int | None = None) -> RankInfo:
    here, number = size if local_size is None else local_size, rank if local_rank is None else local_rank
    return RankInfo(rank, size, number, here)


def test_a_process_that_torchrun_has_not_started_says_how_to_start_it() -> None:
    with pytest.raises(ConfigError, match="start it with torchrun --standalone --nproc-per-node=2"):
        rank_info()


@pytest.mark.parametrize(
    ("own", "arguments", "line"),
    [
        (a_rank(), ["-m", "max_lookahead=1,2"], "^-m: a sweep starts its own pairs"),
        (a_rank(), ["doctor"], "^doctor: under torchrun the command is one of generate, compare, serve$"),
        (a_rank(size=1), ["prompt=a"], "^WORLD_SIZE=1: start 2 processes"),
        (a_rank(size=2), ["target_tensor_parallel_size=3"], "^WORLD_SIZE=2: start 4 processes"),
        (a_rank(local_size=1), ["prompt=a", "target_tensor_parallel_size=2"], "^WORLD_SIZE=2: start 3 processes"),
        (a_rank(local_size=1), ["prompt=a", "transport.insecure=true"], "^transport.address: required on several"),
        (a_rank(local_size=1), ["prompt=a", TWO_NODES], "not on this machine, and the link is neither encrypted nor"),
    ],
)
def test_what_cannot_work_is_one_line_before_anything_listens(own: RankInfo, arguments: list[str], line: str) -> None:
    assert re.search(line, refusal(lambda: compose(arguments, own)))


def test_torchruns_own_report_ends_with_the_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    for name, value in {**places, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}.items():
        monkeypatch.setenv(name, value)
    assert launch.run.run(["prompt=a"]) == 2
    message = json.loads((tmp_path / "error.json").read_text())["message"]
    assert message.startswith("amusd: WORLD_SIZE=3: start 2 processes")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_drafter_by_default_is_said_by_rank_0_alone(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    for name in ("set_environment", "check_workers"):
        monkeypatch.setattr(f"launch.run.{name}", lambda _: None)
    monkeypatch.setattr("launch.run._run_rank", lambda *_: 0)
    with logged() as lines:
        assert launch.run.run(["target=org/model", "prompt=a"]) == 0
    assert [line.partition(" ")[0] for line in lines] == ["drafter=ngram"] * (rank == 0)


@pytest.mark.parametrize("allowed", ["transport.insecure=true", "transport.keys=/keys"])
def test_several_machines_need_keys_or_a_word(allowed: str) -> None:
    command, config = compose(["compare", TWO_NODES, allowed], a_rank(local_size=1))
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
    assert own_device(config, a_rank(2, 4, local_rank=1)) == device


@pytest.fixture
def ranks_meet(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], int]:
    """Returns a function that runs `launch.run.run` in this process as a rank of two on one machine."""
    store = HashStore()
    monkeypatch.setattr("torch.distributed.rendezvous", lambda *_, **__: iter([(store, 0, 2)]))
    monkeypatch.setattr("launch.run.set_environment", lambda _num_threads: None)

    def as_rank(rank: int) -> int:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        return launch.run.run(["hardware=cpu", "hardware.pin_cores=false"])

    return as_rank


def test_a_run_that_is_over_at_once_leaves_no_folder_and_no_rank_that_waits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks_meet: Callable[[int], int]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    jobs = Mock()
    jobs.run.side_effect = [ConfigError("no prompt"), 0]
    monkeypatch.setattr("launch.run.Jobs", lambda *_: jobs)
    with pytest.raises(ConfigError, match="no prompt"):
        ranks_meet(0)
    assert list(tmp_path.iterdir()) == []
    assert ranks_meet(0) == 0
    assert list(tmp_path.iterdir()) == []
    assert ranks_meet(1) == 0


def meet_apart(monkeypatch: pytest.MonkeyPatch, host: str) -> tuple[RunConfig, Rendezvous]:
    """Rendezvous as rank 0 of two machines; its own address is `host`."""
    monkeypatch.setattr("launch.run.address_towards", lambda _: host)
    config = RunConfig(
        transport=TransportConfig(address="tcp://first:29501", insecure=True),
        hardware=HardwareConfig(devices=("cpu", "cpu")),
    )
    store = HashStore()
    for key, value in (("device/1", "cpu"), ("address/1", "tcp://10.0.0.2:29501")):
        store.set(key, value)
    return launch.run._rendezvous_apart(store, config, a_rank(local_size=1))


@pytest.mark.parametrize(
    ("host", "address"), [("10.0.0.1", "tcp://10.0.0.1:29501"), ("fd00::1", "tcp://[fd00::1]:29501")]
)
def test_rank_0_and_the_draft_listen_at_their_addresses_in_the_network(
    monkeypatch: pytest.MonkeyPatch, host: str, address: str
) -> None:
    config, rendezvous = meet_apart(monkeypatch, host)
    assert (config.transport.address, rendezvous.address, rendezvous.host) == ("tcp://10.0.0.2:29501", address, host)
    assert check_address(address, beyond=True, to_bind=True) == (address, False)


@pytest.mark.parametrize("host", ["127.0.1.1", "::1"])
def test_an_address_that_other_machines_cannot_reach_is_refused(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    with pytest.raises(ConfigError, match=f"^transport.address=tcp://first:29501: leads to {host} .*/etc/hosts"):
        meet_apart(monkeypatch, host)


@pytest.mark.parametrize("host", ["no.such.invalid", "two..dots", "[::1", "x" * 64])
def test_a_name_that_is_no_address_is_refused_in_a_line(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"^transport\.address=tcp://{re.escape(host)}:5: .*"):
        address_towards(f"tcp://{host}:5")


@pytest.mark.parametrize("kind", ["open to the group", "another user's", "a link", "a file"])
def test_ranks_meet_in_no_folder_that_others_may_enter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    (folder := tmp_path / "folder").mkdir()
    folder.chmod(0o710 if kind == "open to the group" else 0o700)
    if kind == "another user's":
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    elif kind == "a link":
        (folder := tmp_path / "link").symlink_to("folder")
    elif kind == "a file":
        (folder := tmp_path / "file").touch(0o600)
    with ExitStack() as stack, pytest.raises(ConfigError, match="not private to this user"):
        rendezvous_in(str(folder), stack)


@pytest.mark.timeout(200)
def test_two_ranks_and_a_draft_give_the_tokens_of_one_process(tmp_path: Path, small_pair: list[str]) -> None:
    arguments = ["target_tensor_parallel_size=2", *WAITING, f"prompt={PROMPT}", "output=json", "run_dir=out"]
    line = torchrun_command(*small_pair, *arguments, "sampling.max_new_tokens=24", num_processes=3)
    (temporary := tmp_path / "temporary").mkdir()
    done = run(line, tmp_path, TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    together = json.loads(done.stdout)
    expected = plain_answer(small_pair, 24)
    assert tuple(together["token_ids"]) == expected
    assert len(set(expected)) > 5, "this answer is too simple to tell models apart"
    assert together["mode"] == "asynchronous"
    assert together["metrics"]["num_draft_tokens"] > 0
    assert {path.name for path in (tmp_path / "out" / "events").iterdir()} == {"target.jsonl", "draft.jsonl"}
    assert list(temporary.glob("amusd*")) == []


@pytest.mark.timeout(200)
def test_the_last_rank_replaces_a_killed_draft_which_is_its_child(tmp_path: Path, small_pair: list[str]) -> None:
    arguments = [f"prompt={PROMPT}", "sampling.max_new_tokens=200", *BLOCKS, "run_dir=out"]
    with begun(torchrun_command(*small_pair, *arguments), tmp_path) as process:
        ranks = psutil.Process(process.pid).children()
        target = json.loads((tmp_path / "out" / "workers.json").read_text())["target"]
        (last,) = [rank for rank in ranks if rank.pid not in target]
        assert [descendants(pid) for pid in target] == [[]]
        descendants(last.pid)[-1].kill()
        _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    assert "and replaced once" in said.decode()
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert tuple(result["token_ids"]) == plain_answer(small_pair, 200)
