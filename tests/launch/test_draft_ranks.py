"""Several ranks of the draft: who is who, the same tokens, and what the death of one does."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from amusd.tracing.timeline import read_events
from launch.process_tree import descendants
from tests.launch.processes import FAKE, SECONDS, amusd_command, environment, run, torchrun_command
from tests.launch.small_pair import PROMPT, plain_answer, save_pair
from tests.warm import Popen

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="process trees are read from /proc"),
]

TWO = "draft_tensor_parallel_size=2"
NUM_TOKENS = 600
"""So many that a process can be killed before they are all there."""


def test_the_next_draft_has_other_ranks_of_its_own(tmp_path: Path) -> None:
    done = run(amusd_command("generate", FAKE, TWO, "prompt=draft comes back", "run_dir=out"), tmp_path)
    assert done.returncode == 0, done.stderr
    second = (tmp_path / "out" / "second").read_text()
    draft = json.loads((tmp_path / "out" / "workers.json").read_text())["draft"]
    assert len(draft) == 2
    assert draft[0] == int(second)
    assert done.stderr.count("was killed by signal 9") == 1


def test_a_rank_of_the_draft_that_is_killed_is_started_anew_for_the_next_one(tmp_path: Path) -> None:
    done = run(amusd_command("generate", FAKE, TWO, "prompt=draft rank is killed", "run_dir=out"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("was killed by signal 9") == 1
    assert "amusd: rank 1 of the draft (pid " in done.stderr
    assert done.stderr.count("ends: rank 1 of the draft is gone") == 1
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return save_pair(tmp_path_factory.mktemp("models"), target_layers=2, draft_layers=2)


def test_a_target_and_two_ranks_of_the_draft_by_hand_give_the_tokens_of_plain_decoding(
    tmp_path: Path, pair: list[str]
) -> None:
    arguments = [TWO, f"prompt={PROMPT}", "output=json", "run_dir=out", "sampling.max_new_tokens=24"]
    sampled = [*pair, "sampling.temperature=0.7", "sampling.seed=3"]
    done = run(torchrun_command(*sampled, *arguments, "mode=synchronous"), tmp_path)
    assert done.returncode == 0, done.stderr
    together = json.loads(done.stdout)
    expected = plain_answer(sampled, 24)
    assert tuple(together["token_ids"]) == expected
    assert len(set(expected)) > 5, "this answer is too simple to tell models apart"
    assert together["metrics"]["acceptance_rate"] > 0.9, "the draft is the target's own model"
    workers = json.loads((tmp_path / "out" / "workers.json").read_text())
    assert (len(workers["target"]), len(workers["draft"])) == (1, 2)
    assert len({*workers["target"], *workers["draft"]}) == 3


class Running:
    """A long answer whose first text has appeared."""

    def __init__(self, folder: Path, pair: Sequence[str], *more: str, num_tokens: int = 200) -> None:
        arguments = [TWO, f"prompt={PROMPT}", "run_dir=out", f"sampling.max_new_tokens={num_tokens}"]
        self.process = Popen(
            amusd_command("generate", *pair, *arguments, *more),
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.read(1)
        self._handles = {pid: os.pidfd_open(pid) for pid in descendants(self.process.pid)}
        self._folder = folder / "out"
        self.draft = self.workers["draft"]

    @property
    def workers(self) -> dict[str, list[int]]:
        workers: dict[str, list[int]] = json.loads((self._folder / "workers.json").read_text())
        return workers

    @property
    def num_processes(self) -> int:
        return len(self._handles)

    def end(self) -> tuple[int, str]:
        """Exit code and standard error, once every process of the tree has ended."""
        _, errors = self.process.communicate(timeout=SECONDS)
        for pid, handle in self._handles.items():
            assert select.select([handle], [], [], SECONDS)[0], f"process {pid} is left over"
            os.close(handle)
        return self.process.returncode, errors.decode()


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_the_draft_is_replaced_as_a_whole_whichever_rank_is_killed(tmp_path: Path, pair: list[str], rank: int) -> None:
    long_pair = [*pair, "max_model_len=1024"]
    running = Running(
        tmp_path, long_pair, "mode=synchronous", "--roles=tests.launch.patient_target", num_tokens=NUM_TOKENS
    )
    killed = running.draft[rank]
    os.kill(killed, signal.SIGKILL)
    code, errors = running.end()
    assert code == 0, errors
    if rank == 0:
        assert f"the draft's process (pid {killed}) was killed by signal 9" in errors
    else:
        assert f"rank 1 of the draft (pid {killed}) was killed by signal 9" in errors
        assert "the draft was lost once (amusd.errors.RankLostError: rank 1 of the draft is gone)" in errors
    assert "and replaced once" in errors
    assert "Traceback" not in errors
    assert killed not in running.workers["draft"]
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert tuple(result["token_ids"]) == plain_answer(long_pair, NUM_TOKENS)
    events = read_events(tmp_path / "out", "target")
    back = next(event for event in events if event.name == "draft_back")
    passes = [event for event in events if event.name == "target_pass" and event.start_ns > back.end_ns]
    assert sum(event.fields["num_accepted"] for event in passes) > 0


@pytest.mark.long
def test_both_roles_may_span_ranks_and_ctrl_c_ends_them_all(tmp_path: Path, pair: list[str]) -> None:
    running = Running(tmp_path, pair, "target_tensor_parallel_size=2")
    assert running.num_processes == 4
    assert (len(running.workers["target"]), len(running.draft)) == (2, 2)
    os.killpg(running.process.pid, signal.SIGINT)
    code, errors = running.end()
    assert code == 130
    assert "Traceback" not in errors


@pytest.mark.long
def test_ranks_that_cannot_share_the_draft_are_refused_in_one_line(tmp_path: Path, pair: list[str]) -> None:
    arguments = ["draft_tensor_parallel_size=3", f"prompt={PROMPT}", "run_dir=out"]
    done = run(amusd_command("generate", *pair, *arguments), tmp_path)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if "run directory" not in line]
    assert len(lines) == 1
    assert "draft_tensor_parallel_size=3: each rank needs a key head, and this model has 2; allowed: 1 to 2" in lines[0]
