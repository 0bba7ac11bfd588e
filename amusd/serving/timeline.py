"""The work of both devices as server-sent events. Without listeners it costs nothing.

Events come from the target's recorder. `candidates` is the time at which the target takes in a message of the draft; a
message that arrives during a pass waits for the end of the pass. `rollback` is the end of a pass that rejected a
candidate and left none.

    data: {"device": "target", "kind": "pass", "begin": 12.034, "end": 12.055, "sequence": 3,
           "candidates": 4, "accepted": 3, "tokens": 4, "alternatives": 0}

    device  kind        candidates                        other fields
    target  prefill
    target  wait                                          (because the policy chose to)
    target  pass        judged                            accepted, tokens (committed), alternatives (scored)
    target  verdict                                       tokens (committed)
    draft   candidates  in the message                    taken (false: stale, contradicted or refused)
    draft   rollback
    draft   lost, back

`begin` and `end` are seconds of the server's monotonic clock, `sequence` names an answer (-1: none). A slow listener
misses the oldest events.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from amusd.tracing.events import Event, MessageEvent, TargetPass
from amusd.tracing.recorder import Recorder

MAX_WAITING = 4096
"""Most events kept for a listener: some seconds of work."""
LOOK_SECONDS = 0.1


async def listen(recorder: Recorder, is_over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
    """Server-sent events from now on, several at a time, until `is_over`. Runs in the event loop's thread."""
    queue: deque[Event] = deque(maxlen=MAX_WAITING)
    keep = queue.append
    recorder.listeners += (keep,)
    try:
        yield b": what happens from now on\n\n"
        while not is_over():
            events = (queue.popleft() for _ in range(len(queue)))
            parts = [f"data: {json.dumps(told)}\n\n" for event in events for told in lines_of(event)]
            if parts:
                yield "".join(parts).encode()
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        recorder.listeners = tuple(listener for listener in recorder.listeners if listener is not keep)


def lines_of(event: Event) -> list[dict[str, Any]]:
    """The lines for listeners about an event."""
    match event:
        case TargetPass(num_judged=judged, num_accepted=accepted, num_tokens=tokens, num_alternatives=others):
            counts = {"candidates": judged, "accepted": accepted, "tokens": tokens, "alternatives": others}
            rolled_back = [_line("draft", "rollback", event) | {"begin": event.end_ns / 1e9}]
            has_missed = event.has_rejected and not event.num_ready
            return [_line("target", "pass", event, **counts), *(rolled_back if has_missed else ())]
        case MessageEvent(name="send", message="verdict", num_tokens=tokens):
            return [_line("target", "verdict", event, tokens=tokens)]
        case MessageEvent(name="receive", message="candidate", num_tokens=number) if number:
            return [_line("draft", "candidates", event, candidates=number, taken=event.reception == "taken")]
        case Event(name="target_prefill" | "target_wait" | "draft_lost" | "draft_back"):
            device, kind = event.name.split("_")
            return [_line(device, kind, event)]
    return []


def _line(device: str, kind: str, event: Event, **fields: Any) -> dict[str, Any]:
    times = {"begin": event.start_ns / 1e9, "end": event.end_ns / 1e9}
    return {"device": device, "kind": kind, **times, "sequence": event.sequence_id, **fields}
