"""The workers on virtual time and in threads: under one script the same run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from runtime.pair import PROMPT, VOCAB_SIZE, WIDTH, decoding, pair, params
from simulation.builders import of_answers

from amusd.config import DecodingConfig
from amusd.drafters.base import Drafter
from amusd.drafters.synthetic import SyntheticDrafter
from amusd.engine import SYNTHETIC
from amusd.protocol.draft_session import Guesses, Node, Transition
from amusd.simulation.cost import Costs, Duration, Shared
from amusd.simulation.simulator import Simulator
from amusd.simulation.tokens import drawn_answers, guess_places
from amusd.tracing.events import Event
from amusd.tracing.timeline import by_sequence
from amusd.types import Mode

NUM_TOKENS = 40
PASS_SECONDS = 0.1
"""Of the target's prefill too: the draft has all that it may have when the first pass begins."""
ACCEPT_NEXT = 0.5


class NoModel(Drafter):
    """Another drafter replaces its guesses."""

    length = 0

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """No time at all."""
        self.length = len(token_ids)

    def expand(self, root: Node, nodes: Sequence[Node], num_tokens: int = 1) -> list[Guesses]:
        return []

    def follow(self, transition: Transition) -> None:
        """Nothing is kept."""
        self.length = transition.committed_length

    def close(self) -> None:
        """Nothing to release."""


class ScriptedTreeDrafter(SyntheticDrafter):
    """Has the target's token at the place that the simulated draft has it at."""

    def __init__(self, accept: float, places: Sequence[int]) -> None:
        super().__init__(NoModel(), accept, ACCEPT_NEXT, VOCAB_SIZE)
        self._places = places

    def _rank(self, position: int) -> int:
        return self._places[position - len(PROMPT)]


@dataclass(frozen=True)
class RealTree:
    """The events of one real answer."""

    target: list[Event]
    draft: list[Event]


def tree(**changes: object) -> DecodingConfig:
    """The draft is always done before the pass is, and the target waits for all of a path: timing has no say."""
    settled = {"policy": "branching", "min_candidates": 4, "max_wait_passes": 20.0, "fan_out": 3, "rows_per_step": 3}
    return decoding(Mode.ASYNCHRONOUS, 4, **{**settled, **changes})


def machine() -> Simulator:
    costs = Costs(
        passes={0: Shared.same(Duration.of_ms(1e3 * PASS_SECONDS))},
        draft_token=Shared.same(Duration.of_ms(0.1)),
        target_prefill=Duration.of_ms(1e3 * PASS_SECONDS),
        to_target=Duration.of_ms(0.05),
        to_draft=Duration.of_ms(0.05),
    )
    answers = drawn_answers(0.6, num_answers=1, num_tokens=NUM_TOKENS, seed=4)
    return of_answers(answers, costs, max_candidates=WIDTH - 1, accept_next=ACCEPT_NEXT)


@contextmanager
def real_tree(simulator: Simulator, schedule: DecodingConfig) -> Iterator[RealTree]:
    places = guess_places(simulator.answers[0], ACCEPT_NEXT, schedule.fan_out, f"1 {simulator.seed}")
    factory = {SYNTHETIC: lambda: ScriptedTreeDrafter(simulator.accept, places)}
    with pair({}, factory, pass_seconds=PASS_SECONDS) as (engine, draft):
        engine.generate(PROMPT, params(NUM_TOKENS), decoding=schedule, drafter=SYNTHETIC)
        recorder = engine.worker.recorder
    assert draft.error is None
    drafted = by_sequence(draft.recorder.events)
    (number,) = [number for number, events in drafted.items() if any(e.name == "draft_step" for e in events)]
    yield RealTree(by_sequence(recorder.events)[number], drafted[number])


@pytest.mark.long
def test_one_script_gives_one_run() -> None:
    """Which nodes were computed in which step, what each pass judged, what each verdict found prepared."""
    simulator, schedule = machine(), tree()
    simulated = simulator.run(schedule, keep_events=True)
    with real_tree(simulator, schedule) as real:
        expected = story(real.draft, real.target, len(PROMPT))
    prompt_length = simulated.metrics.num_prompt_tokens
    assert story(simulated.draft_events, simulated.target_events, prompt_length) == expected
    assert any(fields.get("kept_steps") for _, fields in expected)
    assert any(name == "rollback" for name, _ in expected)


def story(draft: Sequence[Event], target: Sequence[Event], prompt_length: int) -> list[tuple[str, dict[str, object]]]:
    """What happened, first on the draft, then on the target; lengths without the prompt's."""
    found = []
    for event in (*draft, *target):
        if event.name in ("draft_step", "advance", "rollback", "target_pass"):
            fields = dict(event.fields)
            for name in ("length", "committed_length"):
                if name in fields:
                    fields[name] -= prompt_length
            found.append((event.name, fields))
    return found
