"""torchrun's processes on one machine: who they are, what is refused, where they meet, and the pair's answer."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from runtime.gpu_doubles import pretend_gpus
from torch.distributed import HashStore

from amusd.config import EngineConfig, HardwareConfig, RunConfig, TransportConfig
from amusd.errors import ConfigError
from amusd.models.meeting import Meeting
from amusd.transport.base import Rendezvous
from amusd.transport.factory import numbered_link
from amusd.types import Role
from launch import torchrun
from launch.torchrun import (
    DraftElsewhere,
    Place,
    _look_after_draft,
    compose,
    meet_in_folder,
    own_devices,
    place_from_environment,
)
from tests.launch.processes import WAITING, run, torchrun_command
from tests.launch.small_pair import PROMPT, plain_answer, save_pair

DEADLINE_SECONDS = 30.0
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
TWO_NODES = "transport.address=tcp://10.0.0.1:29501"


def a_place(rank: int = 0, size: int = 2, *, local_size: int | None = None, local_rank: int | None = None) -> Place:
    here, number = size if local_size is None else local_size, rank if local_rank is None else local_rank
    return Place(rank=rank, size=size, local_rank=number, local_size=here)


def test_a_process_knows_its_place_from_torchrun_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    own = place_from_environment()
    assert (own.rank, own.size, own.is_apart, own.is_last) == (0, 2, True, False)
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
    ("nodes", "num_targets", "named", "devices"),
    [
        ([(1, 8), (2, 8)], 2, "", "cuda:0 cuda:0 cuda:1"),
        ([(3, 2), (2, 1)], 4, "", "cuda:0 cuda:0 cuda:1 cuda:0 cuda:0"),
        ([(1, 1), (2, 0)], 2, "", "cuda:0 cpu cpu"),
        ([(1, 4), (1, 2)], 4, "", "cuda:0 cuda:1 cuda:2 cuda:3 cuda:0"),
        ([(2, 2), (1, 2)], 2, "cuda:1,cuda:0,cuda:1", "cuda:1 cuda:0 cuda:1"),
    ],
    ids=["a GPU each", "too few", "none on one", "two processes for five ranks", "named"],
)
def test_each_machine_gives_its_own_gpus_to_its_ranks(
    monkeypatch: pytest.MonkeyPatch, nodes: list[tuple[int, int]], num_targets: int, named: str, devices: str
) -> None:
    """`nodes`: processes and GPUs of each."""
    size = sum(number for number, _ in nodes)
    found: list[str] = []
    hardware = HardwareConfig(devices=tuple(named.split(",")) if named else ())
    config = RunConfig(target_tensor_parallel_size=num_targets, hardware=hardware)
    first = 0
    for local_size, num_gpus in nodes:
        pretend_gpus(monkeypatch, num_gpus)
        for number in range(local_size):
            found += own_devices(config, a_place(first + number, size, local_size=local_size, local_rank=number))
        first += local_size
    assert " ".join(found) == devices


def test_a_folder_that_others_may_enter_is_not_taken_from_the_store(tmp_path: Path) -> None:
    store = HashStore()
    store.set("folder", str(tmp_path))
    tmp_path.chmod(0o700)
    assert meet_in_folder(store, a_place(1)).address == str(tmp_path)
    tmp_path.chmod(0o770)
    with pytest.raises(ConfigError, match=f"^{tmp_path}: torchrun's store names this folder, which is not private"):
        meet_in_folder(store, a_place(1))


class FakeProcess:
    """A `DraftProcess` that notes what it is told, and ends when it is dismissed."""

    def __init__(self, *_: object, **__: object) -> None:
        self.told: list[object] = []
        self._incarnation, self._has_ended = 0, False

    def prepare(self) -> None:
        self.told.append("prepare")

    def tell(self, incarnation: int, rendezvous: Rendezvous) -> None:
        self.told.append(rendezvous)
        self._incarnation, self._has_ended = incarnation, False

    def met(self) -> None:
        self.told.append("met")

    def dismiss(self) -> None:
        self._has_ended = True

    def ending(self, _timeout: float) -> str | None:
        return "it was dismissed" if self._has_ended else None

    def stop(self) -> None:
        self.told.append("stop")


def test_the_last_rank_starts_drafts_as_rank_0_orders_and_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process = FakeProcess()
    monkeypatch.setattr(torchrun, "DraftProcess", lambda *_, **__: process)
    link = numbered_link(TransportConfig(), str(tmp_path), 1, Role.DRAFT, listens=True)
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(_look_after_draft, EngineConfig(), Meeting(address=str(tmp_path)))
        with closing(link):
            drafts = DraftElsewhere(link, str(tmp_path))
            first, second = (Rendezvous(f"ipc:///{number}", number) for number in (1, 2))
            drafts.tell(1, first)
            drafts.met()
            assert drafts.ending(0.1) is None
            assert drafts.newest() == 1
            drafts.dismiss()
            assert drafts.ending(DEADLINE_SECONDS) == "it was dismissed"
            assert drafts.newest() == 2
            drafts.tell(2, second)
            assert drafts.ending(0.0) is None, "what is known is of the first one"
            assert drafts.newest() == 2
        last.result(DEADLINE_SECONDS)
    assert process.told == ["prepare", first, "met", second, "stop"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("num_processes", [3, pytest.param(2, marks=pytest.mark.long)])
def test_two_ranks_and_a_draft_give_the_tokens_of_one_process(tmp_path: Path, num_processes: int) -> None:
    pair = save_pair(tmp_path)
    arguments = ["target_tensor_parallel_size=2", *WAITING, f"prompt={PROMPT}", "output=json", "run_dir=out"]
    line = torchrun_command(*pair, *arguments, "sampling.max_new_tokens=24", num_processes=num_processes)
    done = run(line, tmp_path)
    assert done.returncode == 0, done.stderr
    together = json.loads(done.stdout)
    expected = plain_answer(pair, 24)
    assert tuple(together["token_ids"]) == expected
    assert len(set(expected)) > 5, "this answer is too simple to tell models apart"
    assert together["mode"] == "asynchronous"
    assert together["metrics"]["num_draft_tokens"] > 0
    assert {path.name for path in (tmp_path / "out" / "events").iterdir()} == {"target.jsonl", "draft.jsonl"}
