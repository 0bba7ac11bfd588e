"""Messages as events: recorded, the sending of each joined with its receiving, and two clocks compared by them.

A link keeps the order of a direction, and a message arrives once, whole, or not at all. So the messages received are
those sent, in the same order, less the lost ones: no number on the wire is needed to tell them apart.

On one host both workers read the same monotonic clock. On two hosts the clocks have different zeros, and messages tell
how far apart: each one arrives after it was sent. With an offset t (draft's clock less target's) and delays >= 0,

    smallest (received - sent) towards the draft   >=  t      towards the target   >=  -t

so t lies between the two; the middle is taken, and half the distance is its uncertainty. Clocks that drift apart within
the run are outside of this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from amusd.protocol.messages import Candidate, Features, Message, Verdict
from amusd.tracing.events import NO_SEQUENCE, Event, MessageEvent, Receive, Send, Worker
from amusd.tracing.recorder import Recorder

SEND, RECEIVE = Send.name, Receive.name
_KINDS = {kind: kind.__name__.lower() for kind in get_args(Message)}


class Flow(NamedTuple):
    """One message: the events of its sending and of its receiving, each on its own worker's clock."""

    sent: Send
    received: Receive

    @property
    def message(self) -> str:
        """Its kind, as `MessageEvent` has it."""
        return self.sent.message

    @property
    def latency_ns(self) -> int:
        """Nanoseconds from the sending to the receiving, by the two clocks as they are."""
        return self.received.start_ns - self.sent.start_ns


def record_message(recorder: Recorder, name: str, message: Message, **received: Any) -> None:
    """Record that `message` is being sent (before it is) or has been received.

    `received`: `reception` and `num_ready` of `Receive`.
    """
    fields: dict[str, Any] = {"message": _KINDS[type(message)]}
    if isinstance(message, Candidate):
        fields["first"] = message.first
        fields["num_tokens"] = len(message.token_ids)
        fields["base"] = message.base
    elif isinstance(message, Verdict):
        fields["start"] = message.start
        fields["num_tokens"] = len(message.token_ids)
        fields["num_accepted"] = message.num_accepted
        fields["epoch"] = message.epoch
    elif isinstance(message, Features):
        fields["start"] = message.start
        fields["num_tokens"] = message.end - message.start
    recorder.mark(name, getattr(message, "sequence_id", NO_SEQUENCE), fields | received)


def match_messages(sender: Sequence[Event], receiver: Sequence[Event]) -> list[Flow]:
    """The messages of one direction that arrived, in order. What only one side has recorded is left out."""
    flows: list[Flow] = []
    alike: dict[tuple[object, ...], deque[tuple[int, Send]]] = {}
    for place, event in enumerate(event for event in sender if isinstance(event, Send)):
        alike.setdefault(_description(event), deque()).append((place, event))
    last = -1
    for received in (event for event in receiver if isinstance(event, Receive)):
        waiting = alike.get(_description(received), deque())
        while waiting and waiting[0][0] < last:  # lost: a later one has arrived
            waiting.popleft()
        if waiting:
            last, match = waiting.popleft()
            flows.append(Flow(match, received))
    return flows


def _description(event: MessageEvent) -> tuple[object, ...]:
    """The fields that are the same on both sides."""
    return (
        event.sequence_id,
        event.message,
        event.num_tokens,
        event.first,
        event.base,
        event.start,
        event.num_accepted,
        event.epoch,
    )


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
    hosts = [next((event.host for event in own if isinstance(event, Worker)), None) for own in (target, draft)]
    if not draft or (hosts[0] is not None and hosts[0] == hosts[1]):
        return Clock(0, 0, same_host=True)
    return estimate_offset(to_draft, to_target)


def estimate_offset(to_draft: Sequence[Flow], to_target: Sequence[Flow]) -> Clock:
    """The offset between two hosts' clocks, from the messages matched in each direction."""
    if not (to_draft and to_target):
        return Clock(0, None, same_host=False)
    there = min(flow.latency_ns for flow in to_draft)
    back = min(flow.latency_ns for flow in to_target)
    # Rounded up, so that the bound stays one.
    return Clock((there - back) // 2, -(-(there + back) // 2), same_host=False)
