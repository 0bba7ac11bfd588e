"""The real run that the simulated one is compared with."""

from __future__ import annotations

import pytest
from tracing.runs import Run, asynchronous, plain, run, synchronous


@pytest.fixture(scope="session")
def real_run() -> Run:
    return run(plain(), synchronous(), asynchronous())
