"""The work of both devices as server-sent events; free while no client listens.

Events come from the target's recorder, which knows the draft by its messages alone: `candidates` is when the target
took a message in, `rollback` when it took in the first message that shows one. Messages that arrive during a pass are
taken in at its end.

    data: {"device": "target", "kind": "pass", "begin": 12.034, "end": 12.055, "sequence": 3,
           "candidates": 4, "accepted": 3, "tokens": 4, "alternatives": 0}

    device  kind        candidates                        other fields
    target  prefill
    target  wait                                          (because the policy chose to)
    target  pass        judged                            accepted, tokens (committed), alternatives (scored)
    target  verdict                                       accepted, tokens (told)
    draft   candidates  in the message                    taken (false: they follow what was rejected)
    draft   rollback
    draft   lost, back

`begin` and `end` are seconds of the server's monotonic clock, `sequence` names an answer (-1: none). A slow listener
misses the oldest events, and is told how many: `event: dropped`, `data: {"number": 120}`.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable
from itertools import count
from typing import Any

from amusd.tracing.drafted import RollbackWatch
from amusd.tracing.events import (
    DraftBack,
    DraftLost,
    Event,
    Receive,
    Send,
    TargetPass,
    TargetPrefill,
    TargetWait,
    WholeSequence,
    event_of,
)
from amusd.tracing.recorder import Record, Recorder

MAX_WAITING = 4096
"""Events kept for a listener: some seconds of work."""
LOOK_SECONDS = 0.1


async def listen(recorder: Recorder, is_over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
    """Server-sent events from now on, several at a time, until `is_over`. For the event loop's thread."""
    queue: deque[tuple[int, Record]] = deque(maxlen=MAX_WAITING)
    numbers = count()

    def keep(record: Record) -> None:
        queue.append((next(numbers), record))

    recorder.listeners += (keep,)
    try:
        story, expected = Story(), 0
        yield b": what happens from now on\n\n"
        while not is_over():
            parts = []
            for _ in range(len(queue)):
                number, record = queue.popleft()
                if number > expected:
                    parts.append(f'event: dropped\ndata: {{"number": {number - expected}}}\n\n')
                expected = number + 1
                parts += (f"data: {json.dumps(told)}\n\n" for told in story.take(event_of(*record)))
            if parts:
                yield "".join(parts).encode()
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        recorder.listeners = tuple(listener for listener in recorder.listeners if listener is not keep)


class Story:
    """Turns the events of the target's worker into what listeners are told."""

    def __init__(self) -> None:
        self._rollbacks: dict[int, RollbackWatch] = {}

    def take(self, event: Event) -> list[dict[str, Any]]:
        """The lines for listeners about the next event."""
        if isinstance(event, WholeSequence):
            self._rollbacks.pop(event.sequence_id, None)
            return []
        told = _told(event)
        if isinstance(event, TargetPass) or (isinstance(event, Send) and event.message == "open"):
            self._rollbacks.setdefault(event.sequence_id, RollbackWatch())
        watch = self._rollbacks.get(event.sequence_id)
        if watch is not None and watch.take(event):
            told.append(_line("draft", "rollback", event))
        return told


def _told(event: Event) -> list[dict[str, Any]]:
    match event:
        case TargetPrefill():
            return [_line("target", "prefill", event)]
        case TargetWait():
            return [_line("target", "wait", event)]
        case TargetPass(num_judged=judged, num_accepted=accepted, num_tokens=tokens, num_alternatives=others):
            counts = {"candidates": judged, "accepted": accepted, "tokens": tokens, "alternatives": others}
            return [_line("target", "pass", event, **counts)]
        case Send(message="verdict", num_accepted=accepted, num_tokens=tokens):
            return [_line("target", "verdict", event, accepted=accepted, tokens=tokens)]
        case Receive(message="candidate", num_tokens=number) if number:
            return [_line("draft", "candidates", event, candidates=number, taken=event.reception == "taken")]
        case DraftLost():
            return [_line("draft", "lost", event)]
        case DraftBack():
            return [_line("draft", "back", event)]
    return []


def _line(device: str, kind: str, event: Event, **fields: Any) -> dict[str, Any]:
    times = {"begin": event.start_ns / 1e9, "end": event.end_ns / 1e9}
    return {"device": device, "kind": kind, **times, "sequence": event.sequence_id, **fields}
