"""Several ranks of the target: who is who, the same tokens as one rank, and what a death does."""

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
from launch.process_tree import descendants

from tests.launch.processes import SECONDS, WAITING, amusd_command, environment, run, torchrun_command
from tests.launch.small_pair import PROMPT, plain_answer, save_pair
from tests.warm import Popen

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="process trees are read from /proc"),
]

TWO = "target_tensor_parallel_size=2"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return save_pair(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("num_processes", [2, pytest.param(3, marks=pytest.mark.long)])
def test_two_ranks_and_a_draft_by_hand_give_the_tokens_of_one_process(
    tmp_path: Path, pair: list[str], num_processes: int
) -> None:
    arguments = [TWO, *WAITING, f"prompt={PROMPT}", "output=json", "run_dir=out", "sampling.max_new_tokens=24"]
    done = run(torchrun_command(*pair, *arguments, num_processes=num_processes), tmp_path)
    assert done.returncode == 0, done.stderr
    together = json.loads(done.stdout)
    expected = plain_answer(pair, 24)
    assert tuple(together["token_ids"]) == expected
    assert len(set(expected)) > 5, "this answer is too simple to tell models apart"
    assert together["mode"] == "asynchronous"
    assert together["metrics"]["num_draft_tokens"] > 0
    workers = json.loads((tmp_path / "out" / "workers.json").read_text())
    num_named = 4 - num_processes  # ranks that rank 0 looks after, itself included
    assert (len(workers["target"]), len(workers["draft"])) == (num_named, 1)
    assert len({*workers["target"], *workers["draft"]}) == num_named + 1


@pytest.mark.long
def test_every_mode_gives_the_plain_answer_of_the_same_ranks(tmp_path: Path, pair: list[str]) -> None:
    arguments = [
        "output=json",
        "sampling.max_new_tokens=16",
        "workload.num_prompts=2",
        "compare.synchronous_lengths=[3]",
    ]
    arguments += ["target.dtype=bfloat16", "max_model_len=256", "sampling.temperature=0.7", TWO]
    done = run(amusd_command("compare", *pair, *arguments), tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) == 3
    assert [row["identical_to_autoregressive"]["num_identical"] for row in rows] == [2, 2, 2]


class Running:
    """A long answer whose first text has appeared."""

    def __init__(self, folder: Path, pair: Sequence[str], *, num_tokens: int = 200) -> None:
        arguments = [f"prompt={PROMPT}", "run_dir=out", f"sampling.max_new_tokens={num_tokens}", TWO]
        self.process = Popen(
            amusd_command("generate", *pair, *arguments),
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
        self.workers = json.loads((folder / "out" / "workers.json").read_text())

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


def test_a_killed_rank_ends_the_run_with_one_clear_error(tmp_path: Path, pair: list[str]) -> None:
    running = Running(tmp_path, pair)
    os.kill(running.workers["target"][1], signal.SIGKILL)
    code, errors = running.end()
    assert code == 1
    assert f"rank 1 of the target (pid {running.workers['target'][1]}) was killed by signal 9" in errors
    assert "amusd: rank 1 of the target is gone" in errors
    assert "ChildFailedError" not in errors
