"""Which links `amusd bench` measures, what it says of those that do not work, and of what `transport=auto` takes."""

from __future__ import annotations

import io

import pytest

from amusd.commands.bench.links import measure_links, recommend
from amusd.config import RunConfig, TransportConfig
from amusd.console import Console
from amusd.errors import ConfigError, PeerLostError
from amusd.transport.factory import Choice
from amusd.transport.latency import OneWayTime

CHOICE = Choice("shared_memory", "a reason")
BROKEN = {"unavailable": "not here"}


def taking(microseconds: float) -> dict[str, float]:
    return {"one_way_us_p50": microseconds, "one_way_us_p99": 99.0, "poll_us": 1.0, "num_messages": 10}


def test_every_link_is_measured_and_one_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(link: TransportConfig, **_orders: object) -> OneWayTime:
        if link.kind == "shared_memory":
            raise ConfigError("not here")
        if link.kind == "nccl":
            raise PeerLostError("it died")
        return OneWayTime(p50_us=1.0, p99_us=2.0, num_messages=10, poll_us=0.5, address="")

    monkeypatch.setattr("amusd.commands.bench.links.measure_one_way", measure)
    taken = {"one_way_us_p50": 1.0, "one_way_us_p99": 2.0, "poll_us": 0.5, "num_messages": 10}
    assert measure_links(RunConfig(), [0, 1], Console(out=io.StringIO(), err=io.StringIO())) == {
        "shared_memory": {"unavailable": "not here"},
        "zeromq": taken,
        "zeromq_tcp": taken,
        "gloo": taken,
        "nccl": {"unavailable": "it died"},
    }


@pytest.mark.parametrize("other", [12.5, 12.3])
def test_the_link_that_auto_takes_is_said_to_be_the_quickest_where_no_other_was_quicker(other: float) -> None:
    found = recommend(CHOICE, {"zeromq": taking(other), "shared_memory": taking(12.3), "nccl": BROKEN})
    assert (found["quickest"], found["type_instead"]) == ("shared_memory", None)
    assert found["text"] == "transport=auto takes shared_memory here (a reason): 12.3 us, the quickest measured"


def test_a_quicker_one_is_named_with_what_to_type() -> None:
    found = recommend(CHOICE, {"shared_memory": taking(12.3), "zeromq_tcp": taking(12.2), "gloo": taking(80.0)})
    assert (found["link"], found["quickest"]) == ("shared_memory", "zeromq_tcp")
    assert found["type_instead"] == "transport=zeromq transport.address=tcp://127.0.0.1:0"
    assert found["text"] == (
        "transport=auto takes shared_memory here (a reason): 12.3 us; zeromq_tcp was quicker, 12.2 us: "
        "transport=zeromq transport.address=tcp://127.0.0.1:0"
    )


def test_it_is_said_what_else_the_quicker_one_costs() -> None:
    found = recommend(CHOICE, {"shared_memory": taking(90.0), "gloo": taking(80.0)})
    assert found["text"].endswith(
        "gloo was quicker, 80.0 us: transport=gloo (a draft that is lost is not replaced then)"
    )


def test_what_could_not_be_measured_is_said_too() -> None:
    found = recommend(CHOICE, {"shared_memory": BROKEN, "zeromq": taking(50.0)})
    assert found["text"].endswith("(a reason): it could not be measured; zeromq was quicker, 50.0 us: transport=zeromq")
    found = recommend(CHOICE, {"shared_memory": BROKEN})
    assert (found["quickest"], found["type_instead"]) == (None, None)
    assert found["text"].endswith("(a reason); no link could be measured")
