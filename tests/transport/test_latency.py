"""The measuring of links: real processes, plausible figures, and an end whatever happens to the child."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from amusd.config import TransportConfig
from amusd.errors import PeerLostError
from amusd.transport import latency


@pytest.mark.parametrize("kind", ["shared_memory", "zeromq"])
def test_every_link_between_two_processes_can_be_measured(kind: Any) -> None:
    if kind == "shared_memory" and not hasattr(os, "memfd_create"):
        pytest.skip("shared memory is for Linux")
    before = os.sched_getaffinity(0)
    core = {min(before)}  # both ends may share one
    taken = latency.measure_one_way(TransportConfig(kind=kind), num_messages=100, cores=(core, core))
    assert 0.0 < taken.p50_us <= taken.p99_us < 10e6
    assert os.sched_getaffinity(0) == before


def test_a_child_that_cannot_run_is_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PeerLostError):
        latency.measure_one_way(TransportConfig(), num_messages=10)
