"""The measuring of links: real processes, plausible figures, and an end whatever happens to the child."""

from __future__ import annotations

import os
import sys

import pytest

from amusd.config import TransportConfig
from amusd.errors import ConfigError, PeerLostError
from amusd.transport import latency

CONFIGS = {
    "shm": TransportConfig(kind="shared_memory"),
    "ipc": TransportConfig(kind="zeromq"),
    "tcp": TransportConfig(kind="zeromq", address="tcp://127.0.0.1:*"),
}


@pytest.mark.parametrize("scheme", CONFIGS)
def test_every_link_between_two_processes_can_be_measured(scheme: str) -> None:
    if scheme == "shm" and not hasattr(os, "memfd_create"):
        pytest.skip("shared memory is for Linux")
    taken = latency.measure_one_way(CONFIGS[scheme], num_messages=200)
    assert 0.0 < taken.p50_us <= taken.p99_us < 10e6


def test_the_cores_of_this_process_are_given_back() -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("cores cannot be chosen here")
    before = os.sched_getaffinity(0)
    cores = {min(before)}, {max(before)}
    latency.measure_one_way(TransportConfig(), num_messages=10, cores=cores)
    assert os.sched_getaffinity(0) == before


def test_a_child_that_cannot_run_is_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PeerLostError):
        latency.measure_one_way(TransportConfig(), num_messages=10)


def test_a_link_that_does_not_work_here_is_the_user_s_error() -> None:
    with pytest.raises(ConfigError):
        latency.measure_one_way(TransportConfig(address="tcp://127.0.0.1"), num_messages=10)
