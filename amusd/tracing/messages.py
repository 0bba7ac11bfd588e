"""Messages as events, and the sending of each joined with its receiving.

A direction keeps its order and loses messages only whole, so those received are those sent, in order, less the lost
ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any, TypeAlias, get_args

from amusd.protocol.messages import Candidate, Features, Message, Verdict
from amusd.tracing.events import NO_SEQUENCE, Event, EventName, MessageEvent
from amusd.tracing.recorder import Recorder

_RECORDED = ("first", "base", "start", "epoch")
_description = attrgetter("sequence_id", "message", "num_tokens", *_RECORDED)
_KINDS = {kind: kind.__name__.lower() for kind in get_args(Message)}

Flow: TypeAlias = tuple[MessageEvent, MessageEvent]
"""One message: the events of its sending and of its receiving."""


def record_message(recorder: Recorder, name: EventName, message: Message, **received: Any) -> None:
    """Record that `message` is being sent (before it is) or has been received.

    `received`: `reception` and `num_ready`.
    """
    fields = {name: getattr(message, name, None) for name in _RECORDED}
    if isinstance(message, Features):
        fields["num_tokens"] = message.end - message.start
    elif isinstance(message, (Candidate, Verdict)):
        fields["num_tokens"] = len(message.token_ids)
    sequence_id = getattr(message, "sequence_id", NO_SEQUENCE)
    recorder.instant(name, sequence_id, message=_KINDS[type(message)], **fields, **received)


def match_messages(sender: Sequence[Event], receiver: Sequence[Event]) -> list[Flow]:
    """The messages of one direction that arrived, in order; without what only one side recorded."""
    flows: list[Flow] = []
    sent = list(_of_name("send", sender))
    descriptions = [_description(event) for event in sent]
    place = -1
    for received in _of_name("receive", receiver):
        with suppress(ValueError):  # its sender did not record it
            place = descriptions.index(_description(received), place + 1)
            flows.append((sent[place], received))
    return flows


def _of_name(name: EventName, events: Sequence[Event]) -> Iterator[MessageEvent]:
    return (event for event in events if isinstance(event, MessageEvent) and event.name == name)
