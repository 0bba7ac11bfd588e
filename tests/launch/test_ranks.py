"""Several ranks of the target on one machine: the tokens of one rank, and the effect of a death."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from amusd.config import SamplingParams
from amusd.engine import Engine
from launch.compose import compose_config
from tests.launch.processes import SECONDS, amusd_command, assert_gone, begun, descendants
from tests.launch.small_pair import PROMPT, plain_answer

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="process trees are read from /proc"),
]

TWO = "target_tensor_parallel_size=2"


def test_an_engine_from_python_splits_its_target_and_ends_all_its_processes(small_pair: list[str]) -> None:
    config = compose_config([*small_pair, TWO]).engine()
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    before = {*descendants(os.getpid())}
    with Engine.start(dataclasses.replace(config, drafters=())) as engine:
        ranks = {*descendants(os.getpid())} - before
        assert len(ranks) == 1
        assert engine.generate(PROMPT, params).token_ids == plain_answer(small_pair, 24)
    assert_gone([*ranks])


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_run_with_one_clear_error_and_nothing_left(
    tmp_path: Path, small_pair: list[str], killed: int
) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    arguments = [f"prompt={PROMPT}", "run_dir=out", "sampling.max_new_tokens=200", TWO]
    with begun(amusd_command("generate", *small_pair, *arguments), tmp_path, TMPDIR=str(temporary)) as process:
        others = descendants(process.pid)
        rank = json.loads((tmp_path / "out" / "workers.json").read_text())["target"][killed]
        os.kill(rank, signal.SIGKILL)
        _, errors = process.communicate(timeout=SECONDS)
    assert_gone(others)
    assert list(temporary.glob("amusd-ranks*")) == []
    assert process.returncode == (1 if killed else -signal.SIGKILL)
    assert bool(killed) == (f"amusd: rank 1 of the target (pid {rank}) was killed by signal 9; " in errors.decode())
