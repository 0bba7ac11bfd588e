"""One real run for all tests of this folder that only look at it."""

from __future__ import annotations

import pytest
from tracing.runs import Run, asynchronous, plain, run, run_branching, synchronous


@pytest.fixture(scope="session")
def real_run() -> Run:
    return run(plain(), synchronous(), asynchronous(), synchronous(2))


@pytest.fixture(scope="session")
def branching_run() -> Run:
    return run_branching(min_candidates=1)
