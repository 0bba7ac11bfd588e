"""The real run that the simulated one is compared with."""

from __future__ import annotations

import pytest
from tracing.runs import Run, asynchronous, plain, run, synchronous


@pytest.fixture(scope="session")
def real_run() -> Run:
    """Sequences 1 to 3: plain, synchronous, asynchronous."""
    return run(plain(), synchronous(), asynchronous())
