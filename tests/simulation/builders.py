"""Small simulated machines whose draft step takes one millisecond."""

from __future__ import annotations

from typing import Any

from amusd.config import DecodingConfig
from amusd.simulation.cost import Costs, Duration, Shared
from amusd.simulation.simulator import Outcome, Simulator
from amusd.simulation.tokens import Answer, drawn_answers
from amusd.types import Mode

PLAIN = DecodingConfig(mode=Mode.AUTOREGRESSIVE)


def synchronous(length: int) -> DecodingConfig:
    return DecodingConfig(mode=Mode.SYNCHRONOUS, num_speculative_tokens=length)


def chain(min_candidates: int, **changes: Any) -> DecodingConfig:
    """Without the limits that a real run has on run-ahead and waiting."""
    unlimited = {"max_lookahead": 200, "max_wait_passes": 100.0, "min_candidates": min_candidates}
    return DecodingConfig(**{"policy": "chain", **unlimited, **changes})


def branching(min_candidates: int, **changes: Any) -> DecodingConfig:
    """Likewise, but for run-ahead, which a tree of many guesses rarely gets that far; one path a pass."""
    return chain(min_candidates, **{"policy": "branching", "max_lookahead": 24, "verify_breadth": 1, **changes})


def windowed(length: int) -> DecodingConfig:
    return DecodingConfig(policy="windowed", num_speculative_tokens=length)


def costs(c: float, *, delay: float = 0.0, spread: float = 0.0, **changes: Any) -> Costs:
    """A pass takes `c` draft steps, a message `delay` passes."""
    link = Duration.of_ms(delay * c)
    settings = {
        "passes": {0: Shared.same(Duration.of_ms(c, spread))},
        "draft_token": Shared.same(Duration.of_ms(1.0, spread)),
        "to_target": link,
        "to_draft": link,
    }
    return Costs(**{**settings, **changes})


def simulator(a: float, costs: Costs, *, num_answers: int = 1, num_tokens: int = 3000, seed: int = 3) -> Simulator:
    answers = drawn_answers(a, num_answers=num_answers, num_tokens=num_tokens, seed=seed)
    return Simulator(costs=costs, answers=answers, max_candidates=64, seed=seed)


def of_answers(answers: tuple[Answer, ...], costs: Costs, **changes: Any) -> Simulator:
    return Simulator(**{"costs": costs, "answers": answers, "max_candidates": 64, **changes})


def speedup(machine: Simulator, decoding: DecodingConfig) -> float:
    """Over plain decoding, which takes one pass a token and nothing else here."""
    outcome = machine.run(decoding).metrics
    return outcome.num_tokens * machine.costs.passes[0].alone.samples[0] / outcome.total_ns


def own_tokens(outcome: Outcome) -> int:
    """Tokens that the target made itself, counted pass by pass."""
    passes = [event.fields for event in outcome.target_events if event.name == "target_pass"]
    return sum(fields["num_tokens"] - fields["num_accepted"] for fields in passes)
