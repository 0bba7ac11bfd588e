"""Which links `amusd bench` measures, and what it says of those that do not work."""

from __future__ import annotations

import io

import pytest

from amusd.bench.run import _measure_links
from amusd.config import RunConfig, TransportConfig
from amusd.console import Console
from amusd.errors import ConfigError, PeerLostError
from amusd.transport.latency import OneWayTime


def test_every_link_is_measured_and_one_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(link: TransportConfig, **_orders: object) -> OneWayTime:
        if link.kind == "shared_memory":
            raise ConfigError("not here")
        if link.kind == "nccl":
            raise PeerLostError("it died")
        return OneWayTime(p50_us=1.0, p99_us=2.0, num_messages=10, poll_us=0.5, address="")

    monkeypatch.setattr("amusd.bench.run.measure_one_way", measure)
    taken = {"one_way_us_p50": 1.0, "one_way_us_p99": 2.0, "poll_us": 0.5, "num_messages": 10}
    assert _measure_links(RunConfig(), [0, 1], Console(out=io.StringIO(), err=io.StringIO())) == {
        "shared_memory": {"unavailable": "not here"},
        "zeromq": taken,
        "zeromq_tcp": taken,
        "gloo": taken,
        "nccl": {"unavailable": "it died"},
    }
