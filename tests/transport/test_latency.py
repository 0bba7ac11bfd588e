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
    taken = latency.measure_one_way(CONFIGS[scheme], num_messages=201, pause_seconds=0.0001)
    assert taken.num_messages == 202  # both directions
    assert 0.0 < taken.p50_us <= taken.p99_us < 10e6
    assert taken.poll_us > 0.0
    assert taken.address.startswith(f"{scheme}://")


def test_times_are_of_one_way_and_leave_the_warm_up_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "NUM_WARM_UP_EXCHANGES", 1)
    own = latency._Times(sent=[0, 1_000_000, 2_000_000], received=[900_000, 1_500_000, 2_500_000])
    child = latency._Times(sent=[500_000, 1_460_000, 2_470_000], received=[400_000, 1_010_000, 2_020_000])
    taken = latency._summary(own, child, 1.0, "shm://x")
    assert (taken.p50_us, taken.p99_us, taken.num_messages) == (30.0, 40.0, 4)


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
