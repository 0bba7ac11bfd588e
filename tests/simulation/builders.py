"""Small simulated machines whose draft step takes one millisecond."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from amusd.config import DecodingConfig
from amusd.simulation.cost import Costs, Duration
from amusd.simulation.simulator import Simulator
from amusd.simulation.tokens import Script, drawn_answers

PLAIN = DecodingConfig(mode="autoregressive")


def synchronous(length: int) -> DecodingConfig:
    return DecodingConfig(mode="synchronous", num_speculative_tokens=length)


def chain(min_candidates: int, **changes: Any) -> DecodingConfig:
    unlimited = {"max_lookahead": 200, "max_wait_passes": 100.0, "min_candidates": min_candidates}
    return DecodingConfig(**{"policy": "chain", **unlimited, **changes})


def branching(min_candidates: int, **changes: Any) -> DecodingConfig:
    """As `chain`, with less run-ahead, since a tree of many guesses rarely gets far; one path a pass."""
    return chain(min_candidates, **{"policy": "branching", "max_lookahead": 24, "verify_breadth": 1, **changes})


def costs(c: float, *, delay: float = 0.0, spread: float = 0.0, **changes: Any) -> Costs:
    link, step = Duration.of_ms(delay * c), Duration.of_ms(1.0, spread)
    settings = {"passes": {0: Duration.of_ms(c, spread)}, "draft_token": step, "to_target": link, "to_draft": link}
    return Costs(**{**settings, **changes})


def rows_of(c: float, row_ms: float, spread: float = 0.0) -> dict[int, Duration]:
    return {number: Duration.of_ms(c + row_ms * number, spread) for number in range(80)}


def simulator(a: float, costs: Costs, *, num_answers: int = 1, num_tokens: int = 3000) -> Simulator:
    answers = drawn_answers(a, num_answers=num_answers, num_tokens=num_tokens, seed=3)
    return of_answers(answers, costs, seed=3)


def of_answers(answers: tuple[Script, ...], costs: Costs, **changes: Any) -> Simulator:
    return Simulator(**{"costs": costs, "answers": answers, "max_candidates": 64, **changes})


def speedup(machine: Simulator, decoding: DecodingConfig) -> float:
    outcome = machine.run(decoding).metrics
    return outcome.num_tokens * machine.costs.passes[0].samples[0] / outcome.total_ns


def write_run(folder: Path, simulator: Simulator, *schedules: DecodingConfig) -> list[list[int]]:
    """Write the events of all schedules as those of one run; returns the numbers of each schedule's sequences."""
    events = folder / "events"
    events.mkdir(parents=True)
    found: list[list[int]] = []
    for index, decoding in enumerate(schedules):
        part = folder / f"part{index}"
        part.mkdir()
        simulator.run(decoding, events_folder=part)
        found.append([1000 * index + number for number in range(1, len(simulator.answers) + 1)])
        for own in part.iterdir():  # a draft that was not asked has no events
            with (events / own.name).open("a", encoding="utf-8") as file:
                for line in map(json.loads, own.read_text(encoding="utf-8").splitlines()):
                    if line["sequence_id"] >= 0:
                        line["sequence_id"] += 1000 * index
                        line["start_ns"] += index << 50
                        line["end_ns"] += index << 50
                    file.write(json.dumps(line) + "\n")
    return found
