"""What listeners are told of the target's events, and that nobody waits for them."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

from amusd.serving import timeline
from amusd.serving.timeline import MAX_WAITING, Story, listen
from amusd.tracing.events import Event, event_of
from amusd.tracing.recorder import Recorder

PASS = {
    "num_candidates": 3, "num_judged": 3, "num_accepted": 1, "num_tokens": 2,
    "committed_length": 12, "num_ready": 0, "num_alternatives": 2, "num_accepted_alternatives": 0,
}  # fmt: skip


def made(name: str, start_ns: int = 0, end_ns: int = 0, sequence_id: int = 1, **fields: Any) -> Event:
    return event_of(name, start_ns, end_ns, sequence_id, fields)


def candidates(number: int, *, base: int, reception: str = "taken", ready: int = 0, sequence_id: int = 1) -> Event:
    return made(
        "receive", sequence_id=sequence_id, message="candidate", first=1, num_tokens=number, base=base,
        reception=reception, num_ready=ready,
    )  # fmt: skip


def kinds(story: Story, *events: Event) -> list[list[str]]:
    return [[told["kind"] for told in story.take(event)] for event in events]


def test_a_pass_is_told_with_its_times_and_its_counts() -> None:
    assert Story().take(made("target_pass", 2_000_000_000, 2_500_000_000, 7, **PASS)) == [
        {
            "device": "target", "kind": "pass", "begin": 2.0, "end": 2.5, "sequence": 7, "candidates": 3,
            "accepted": 1, "tokens": 2, "alternatives": 2,
        }
    ]  # fmt: skip


def test_a_rollback_is_told_when_a_message_shows_it_and_once() -> None:
    story = Story()
    missed = made("target_pass", **{**PASS, "num_accepted": 1, "num_ready": 0, "committed_length": 12})
    assert kinds(
        story,
        made("send", message="open"),
        candidates(3, base=10, ready=3),
        missed,
        made("send", message="verdict", start=10, num_tokens=2, num_accepted=1, epoch=0),
        candidates(2, base=10, reception="contradicted"),
        candidates(2, base=12, ready=2),
        candidates(2, base=12, ready=4),
    ) == [[], ["candidates"], ["pass"], ["verdict"], ["candidates"], ["candidates", "rollback"], ["candidates"]]


def test_sequences_are_told_apart_and_forgotten() -> None:
    story = Story()
    kinds(story, made("send", message="open"), candidates(3, base=10, ready=3), made("target_pass", **PASS))
    assert kinds(story, candidates(2, base=12, sequence_id=2)) == [["candidates"]]
    assert kinds(story, made("sequence", drafter=None), candidates(2, base=12, ready=2)) == [[], ["candidates"]]
    assert story._rollbacks == {}


def frames(sent: bytes) -> list[str]:
    return sent.decode().split("\n\n")[:-1]


def test_a_listener_hears_what_happens_from_then_on_and_leaves_no_trace(monkeypatch: Any) -> None:
    monkeypatch.setattr(timeline, "LOOK_SECONDS", 0.0)
    recorder = Recorder("target")
    recorder.span("target_prefill", 1, 2, 1)

    async def hear() -> None:
        async with aclosing(listen(recorder, lambda: False)) as events:
            assert (await anext(events)).startswith(b":")
            recorder.span("target_prefill", 1_000_000_000, 3_000_000_000, 4)
            recorder.flush()  # as at the end of an answer: it is in the queue
            told = json.loads((await anext(events)).decode().removeprefix("data: "))
            assert told == {"device": "target", "kind": "prefill", "begin": 1.0, "end": 3.0, "sequence": 4}
            assert len(recorder.listeners) == 1

    asyncio.run(hear())
    assert recorder.listeners == ()


def test_a_slow_listener_misses_the_oldest_events_and_is_told_how_many(monkeypatch: Any) -> None:
    monkeypatch.setattr(timeline, "LOOK_SECONDS", 0.0)
    recorder = Recorder("target")

    async def hear() -> None:
        async with aclosing(listen(recorder, lambda: False)) as events:
            await anext(events)
            for number in range(MAX_WAITING + 25):
                recorder.span("target_prefill", number, number, number)
            sent = frames(await anext(events))
            assert sent[0] == 'event: dropped\ndata: {"number": 25}'
            assert len(sent) == 1 + MAX_WAITING
            assert json.loads(sent[1].removeprefix("data: "))["sequence"] == 25
            recorder.span("target_prefill", 0, 0, 1)
            assert len(frames(await anext(events))) == 1

    asyncio.run(hear())
