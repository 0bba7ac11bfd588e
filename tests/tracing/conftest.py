"""One real run for all tests of this folder that only look at it."""

from __future__ import annotations

import pytest
from tracing.runs import Run, asynchronous, plain, run, synchronous


@pytest.fixture(scope="session")
def real_run() -> Run:
    """Sequences 1 to 4: plain, synchronous, asynchronous, synchronous."""
    return run(plain(), synchronous(), asynchronous(), synchronous(2))
