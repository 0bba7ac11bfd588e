"""One time axis for two workers.

On one host both read the same monotonic clock. On two hosts the clocks have different zeros, and messages tell how far
apart: each one arrives after it was sent. With an offset t (draft's clock less target's) and delays of at least 0,

    smallest (received - sent) towards the draft   >=  t      towards the target   >=  -t

so t lies between the two; the middle is taken, and half the distance is its uncertainty. Clocks that drift apart within
the run are outside of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amusd.tracing.messages import Flow
from amusd.tracing.recorder import Event


@dataclass(frozen=True, slots=True)
class Clock:
    """How the draft's times become the target's: `offset_ns` is taken off them."""

    offset_ns: int
    uncertainty_ns: int | None
    """None: nothing is known, and the times stand side by side as they are."""
    same_host: bool

    def __str__(self) -> str:
        if self.same_host:
            return "one host: both workers read the same monotonic clock, offset 0"
        if self.uncertainty_ns is None:
            return "two hosts, and no messages both ways: the clocks could not be compared, times stand as recorded"
        return (
            f"two hosts: the draft's clock is {self.offset_ns / 1e6:.3f} ms ahead of the target's, "
            f"within {self.uncertainty_ns / 1e6:.3f} ms (from the fastest message each way)"
        )


def compare_clocks(
    target: Sequence[Event], draft: Sequence[Event], to_draft: Sequence[Flow], to_target: Sequence[Flow]
) -> Clock:
    """The clock of a run, from the events of both workers and the messages matched each way."""
    hosts = [_host(target), _host(draft)]
    if not draft or (hosts[0] is not None and hosts[0] == hosts[1]):
        return Clock(0, 0, same_host=True)
    return estimate_offset(to_draft, to_target)


def estimate_offset(to_draft: Sequence[Flow], to_target: Sequence[Flow]) -> Clock:
    """The offset between two hosts' clocks, from the messages matched in each direction."""
    if not (to_draft and to_target):
        return Clock(0, None, same_host=False)
    there = min(_apparent_ns(flow) for flow in to_draft)
    back = min(_apparent_ns(flow) for flow in to_target)
    # Rounded up, so that the bound stays one.
    return Clock((there - back) // 2, -(-(there + back) // 2), same_host=False)


def _apparent_ns(flow: Flow) -> int:
    return flow.received.start_ns - flow.sent.start_ns


def _host(events: Sequence[Event]) -> str | None:
    return next((str(event.fields["host"]) for event in events if event.name == "worker"), None)
