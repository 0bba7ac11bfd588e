"""What listeners are told of the target's events, and that nobody waits for them."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import pytest
from tracing.runs import made

from amusd.serving import timeline
from amusd.serving.timeline import lines_of, listen
from amusd.tracing.recorder import Recorder

PASS = {
    "num_candidates": 3, "num_judged": 3, "num_accepted": 1, "num_tokens": 2,
    "committed_length": 12, "num_ready": 0, "num_alternatives": 2, "num_accepted_alternatives": 0,
}  # fmt: skip


@pytest.mark.parametrize(("accepted", "ready", "told"), [(1, 0, True), (1, 2, False), (3, 0, False)])
def test_a_pass_is_told_with_its_counts_and_a_rollback_if_none_is_left(accepted: int, ready: int, told: bool) -> None:
    counts = {**PASS, "num_accepted": accepted, "num_tokens": accepted + 1, "num_ready": ready}
    done, *more = lines_of(made("target_pass", 2_000_000_000, 2_500_000_000, 7, **counts))
    times = {"begin": 2.0, "end": 2.5, "sequence": 7}
    assert done == {
        "device": "target", "kind": "pass", **times, "candidates": 3, "accepted": accepted, "tokens": accepted + 1,
        "alternatives": 2,
    }  # fmt: skip
    assert more == ([{"device": "draft", "kind": "rollback", **times, "begin": 2.5}] if told else [])


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
