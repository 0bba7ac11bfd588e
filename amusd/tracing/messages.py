"""Messages as events, and the sending of each one joined with its receiving.

A link keeps the order of a direction, and a message arrives once, whole, or not at all. So the messages received are
those sent, in the same order, less the lost ones: no number on the wire is needed to tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from amusd.protocol.messages import Candidate, Message, Verdict
from amusd.tracing.recorder import NO_SEQUENCE, Event, Recorder

SEND, RECEIVE = "send", "receive"
_KINDS = {kind: kind.__name__.lower() for kind in get_args(Message)}
_ONLY_RECEIVED = ("reception", "num_ready")
"""What the receiver adds to the description of a message."""


class Flow(NamedTuple):
    """One message: the events of its sending and of its receiving, each on its own worker's clock."""

    sent: Event
    received: Event

    @property
    def message(self) -> str:
        """`open`, `candidate`, `verdict`, `close`, `progress` or `shutdown`."""
        return str(self.sent.fields["message"])


def record_message(recorder: Recorder, name: str, message: Message, **received: Any) -> None:
    """Record that `message` is being sent (before it is) or has been received.

    `received`: `reception`, what the receiver made of candidates, and `num_ready`, how many it could verify then.
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
    recorder.mark(name, getattr(message, "sequence_id", NO_SEQUENCE), fields | received)


def match_messages(sender: Sequence[Event], receiver: Sequence[Event]) -> list[Flow]:
    """The messages of one direction that arrived, in order. What only one side has recorded is left out."""
    flows: list[Flow] = []
    sent = (event for event in sender if event.name == SEND)
    for received in (event for event in receiver if event.name == RECEIVE):
        match = next((event for event in sent if _description(event) == _description(received)), None)
        if match is None:
            break
        flows.append(Flow(match, received))
    return flows


def _description(event: Event) -> tuple[int, dict[str, Any]]:
    return event.sequence_id, {key: value for key, value in event.fields.items() if key not in _ONLY_RECEIVED}
