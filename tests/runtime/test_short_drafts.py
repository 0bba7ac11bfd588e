"""A draft with fewer positions than the sequence: it drafts up to its last one, and the target goes on alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from runtime.pair import PROMPT, VOCAB_SIZE, WAITING, decoding, pair, params, reference
from table_model import TableModel

from amusd.drafters.base import Drafter
from amusd.drafters.cascade import CascadeDrafter
from amusd.drafters.model import ModelDrafter
from amusd.models.numerics import Numerics

POSITIONS = 30
SHORT = TableModel(
    VOCAB_SIZE,
    seed=7,
    max_length=POSITIONS,
    numerics=Numerics(POSITIONS, fixed=False, has_borders=False, prefill_chunk=POSITIONS, num_tracks=3),
)
SCHEDULES = {
    "synchronous": decoding("synchronous", 4),
    "chain": decoding("asynchronous", policy=WAITING),
    "windowed": decoding("asynchronous", policy="windowed"),
}
MAKERS: dict[str, Callable[[], Drafter]] = {
    "model": lambda: ModelDrafter(SHORT),
    "cascade": lambda: CascadeDrafter(SHORT, ModelDrafter(SHORT)),
}


@pytest.mark.parametrize(
    ("schedule", "drafter", "prompt"),
    [
        ("synchronous", "model", PROMPT),
        ("chain", "cascade", PROMPT),
        ("windowed", "model", PROMPT),
        ("synchronous", "cascade", reference(POSITIONS)),
        ("chain", "model", reference(POSITIONS)),
    ],
)
def test_the_answer_is_the_targets_and_is_drafted_as_far_as_the_draft_reaches(
    schedule: str, drafter: str, prompt: tuple[int, ...]
) -> None:
    with pair({drafter: MAKERS[drafter]}) as (engine, _):
        answer = engine.generate(prompt, params(60), decoding=SCHEDULES[schedule])
    assert answer.token_ids == reference(60, prompt)[len(prompt) :]
    num_drafted = answer.metrics.num_accepted
    assert num_drafted <= max(0, POSITIONS - len(prompt))
    assert num_drafted >= (10 if prompt is PROMPT else 0)
    waits = [event.duration_ns for event in engine.worker.recorder.events if event.name == "target_wait"]
    assert sum(waits) < 15e9, "the target waits for what cannot come"
