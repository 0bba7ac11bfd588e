"""What the end of a pair of workers means for the exit codes of its jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.jobs import _exit_codes
from launch.process_tree import Ended
from launch.scratch import Outcome, read_outcome, tell_begin, tell_exit_code, tell_job_code


def test_what_rank_0_tells_is_read_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "outcome"
    assert read_outcome(path) == Outcome()
    tell_begin(path)
    tell_job_code(path, 0)
    tell_begin(path)
    assert read_outcome(path) == Outcome(job_codes=(0,), num_begun=2)
    tell_job_code(path, 2)
    tell_exit_code(path, 2)
    assert read_outcome(path) == Outcome(job_codes=(0, 2), num_begun=2, exit_code=2)


def test_an_outcome_is_whole_when_the_last_job_or_the_rank_has_ended() -> None:
    assert [Outcome(job_codes=(0,) * number).is_whole(2) for number in range(3)] == [False, False, True]
    assert Outcome(exit_code=1).is_whole(2)


@pytest.mark.parametrize(
    ("codes", "num_begun", "exit_code", "torchrun", "signum", "expected"),
    [
        pytest.param((0, 2, 0), 3, 2, 0, None, (0, 2, 0), id="all jobs ended"),
        pytest.param((0,), 2, None, -9, 2, (0, 130), id="interrupted in the second"),
        pytest.param((0, 0, 0), 3, 0, 0, 2, (0, 0, 0), id="interrupted after the last"),
        pytest.param((), 0, 2, 0, None, (2, 2, 2), id="models that no job could work with"),
        pytest.param((0, 1), 2, 1, 0, None, (0, 1), id="the draft was lost in the second, the third is left"),
        pytest.param((0,), 2, 1, 0, None, (0, 1), id="the second crashed, the third is left"),
        pytest.param((2,), 2, 1, 0, None, (2, 1), id="the same after a refused one"),
        pytest.param((0,), 2, None, 1, None, (0, 1), id="killed in the second"),
        pytest.param((), 0, 1, 0, None, (1,), id="the draft never came: it costs a job, or nothing would end"),
        pytest.param((), 0, None, 0, None, (1,), id="killed before the first"),
    ],
)
def test_every_job_that_began_gets_a_code(
    codes: tuple[int, ...],
    num_begun: int,
    exit_code: int | None,
    torchrun: int,
    signum: int | None,
    expected: tuple[int, ...],
) -> None:
    told = Outcome(job_codes=codes, num_begun=num_begun, exit_code=exit_code)
    assert _exit_codes(Ended(exit_code=torchrun, signum=signum), told, 3) == expected
