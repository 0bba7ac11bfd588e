"""Several ranks of the target on one machine: the same tokens as one rank, and what a death does."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from amusd.config import SamplingParams
from amusd.engine import Engine
from launch.compose import compose_config
from tests.launch.processes import SECONDS, amusd_command, assert_gone, descendants, environment, run
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


def test_an_engine_from_python_splits_its_target_and_ends_all_its_processes(pair: list[str]) -> None:
    config = compose_config([*pair, TWO]).engine()
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    with Engine.start(dataclasses.replace(config, drafters=())) as engine:
        rank = descendants(os.getpid())[-1]
        assert engine.generate(PROMPT, params).token_ids == plain_answer(pair, 24)
    assert_gone([rank])


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
        self._others = descendants(self.process.pid)
        self.workers = json.loads((folder / "out" / "workers.json").read_text())

    def end(self) -> tuple[int, str]:
        """Exit code and standard error, once every process of the tree has ended."""
        _, errors = self.process.communicate(timeout=SECONDS)
        assert_gone(self._others)
        return self.process.returncode, errors.decode()


def test_a_killed_rank_ends_the_run_with_one_clear_error(tmp_path: Path, pair: list[str]) -> None:
    running = Running(tmp_path, pair)
    os.kill(running.workers["target"][1], signal.SIGKILL)
    code, errors = running.end()
    assert code == 1
    assert f"amusd: rank 1 of the target (pid {running.workers['target'][1]}) was killed by signal 9\n" in errors
