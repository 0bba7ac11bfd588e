"""An account of a simulated speed-up: what each pass found ready and waited for, and what one loss less would gain.

Passes are told apart by what the verdict before them met in the draft's tree. One sequence is at work at a time.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that `experiments` can be imported from anywhere

import argparse
import statistics
from dataclasses import replace
from typing import Any

from amusd.config import DecodingConfig
from amusd.console import percent, table
from amusd.simulation.cost import NOTHING, Costs, Duration, Shared
from amusd.simulation.simulator import Outcome, Simulator
from amusd.simulation.tokens import drawn_answers
from amusd.tracing.events import TargetPass, TargetWait, VerdictTaken, WholeSequence
from amusd.types import Mode

Row = dict[str, Any]
VERIFY_MS = 35.0
DELAY_MS = 0.05
SPREAD = 0.05
BLOCKS = range(1, 11)
"""Synchronous lengths, of which the best counts."""
FIRST, UNFORESEEN, BARE, READY = "first of an answer", "not foreseen", "foreseen, nothing behind it", "candidates ready"
"""What the verdict before a pass met in the draft's tree."""


def machine(
    accept: float, ratio: float, *, row_share: float, num_answers: int, num_tokens: int, seed: int
) -> Simulator:
    """A pair that takes `ratio` draft steps a pass; `row_share`: what a further node adds to a step, as a share of it.

    Passes of eight rows, as the embedded pair's.
    """
    step_ms, link = VERIFY_MS / ratio, Duration.of_ms(DELAY_MS)
    costs = Costs(
        passes={0: Shared.of_ms(VERIFY_MS, SPREAD)},
        draft_token=Shared.of_ms(step_ms, SPREAD),
        tree_row_ns=round(row_share * step_ms * 1e6),
        to_target=link,
        to_draft=link,
    )
    answers = drawn_answers(accept, num_answers=num_answers, num_tokens=num_tokens, seed=seed)
    return Simulator(costs=costs, answers=answers, max_candidates=7, accept_next=0.4, seed=seed)


def best_synchronous(simulator: Simulator) -> tuple[float, int]:
    """Tokens per second of the best block length, and the length; passes are as wide as it needs."""
    found = []
    for length in BLOCKS:
        wide_enough = replace(simulator, max_candidates=max(length, simulator.max_candidates))
        outcome = wide_enough.run(DecodingConfig(mode=Mode.SYNCHRONOUS, num_speculative_tokens=length))
        found.append((outcome.throughput.tokens_per_second, length))
    return max(found)


def after_verdicts(outcome: Outcome) -> list[Row]:
    """What passes found and waited for, by what the verdict before them met in the draft's tree."""
    unforeseen = {
        (event.sequence_id, event.committed_length)
        for event in outcome.draft_events
        if isinstance(event, VerdictTaken) and event.num_adopted
    }
    found: dict[str, list[tuple[float, TargetPass, int]]] = {}
    before: TargetPass | None = None
    wait_ns = 0
    for event in outcome.target_events:
        if isinstance(event, WholeSequence):
            before, wait_ns = None, 0
        elif isinstance(event, TargetWait):
            wait_ns += event.duration_ns
        elif isinstance(event, TargetPass):
            if before is None:
                kind = FIRST
            elif before.num_ready:
                kind = READY
            else:
                is_unforeseen = (event.sequence_id, before.committed_length) in unforeseen
                kind = UNFORESEEN if is_unforeseen else BARE
            num_ready = 0 if before is None else before.num_ready
            found.setdefault(kind, []).append((wait_ns / 1e6 / VERIFY_MS, event, num_ready))
            before, wait_ns = event, 0
    num_passes = sum(map(len, found.values()))
    return [
        {
            "verdict": kind,
            "share": len(found[kind]) / num_passes,
            "ready": statistics.fmean(num_ready for _, _, num_ready in found[kind]),
            "waited_passes": statistics.fmean(wait for wait, _, _ in found[kind]),
            "verified": statistics.fmean(done.num_candidates for _, done, _ in found[kind]),
            "tokens": statistics.fmean(done.num_tokens for _, done, _ in found[kind]),
        }
        for kind in (FIRST, UNFORESEEN, BARE, READY)
        if kind in found
    ]


def without_a_loss(simulator: Simulator) -> dict[str, Simulator]:
    """The pair, and the pair with one loss taken away at a time."""
    costs = simulator.costs
    return {
        "auto": simulator,
        "nodes of a step cost nothing": replace(simulator, costs=replace(costs, tree_row_ns=0)),
        "the second guess is always right": replace(simulator, accept_next=1.0),
        "messages take no time": replace(simulator, costs=replace(costs, to_target=NOTHING, to_draft=NOTHING)),
        "passes of 16 rows": replace(simulator, max_candidates=15),
    }


def simulated_text(simulator: Simulator) -> str:
    """The account of one pair: speeds relative to plain decoding, then a line for each kind of pass."""
    plain = simulator.run(DecodingConfig(mode=Mode.AUTOREGRESSIVE)).throughput.tokens_per_second
    best, length = best_synchronous(simulator)
    speeds = []
    for name, pair in without_a_loss(simulator).items():
        outcome = pair.run(DecodingConfig(), keep_events=True)
        metrics, speed = outcome.metrics, outcome.throughput.tokens_per_second
        if pair is simulator:
            passes = after_verdicts(outcome)
        tokens_per_pass = f"{metrics.num_tokens / metrics.num_passes:.2f}"
        speeds.append((name, f"{speed / plain:.2f}", f"{speed / best:.2f}", tokens_per_pass))
    lines = [
        (
            row["verdict"],
            percent(row["share"]),
            *(f"{row[name]:.2f}" for name in ("ready", "waited_passes", "verified", "tokens")),
        )
        for row in passes
    ]
    return "\n\n".join(
        (
            f"synchronous blocks of {length}: {best / plain:.2f} times plain decoding",
            table(("schedule", "x plain", "x best sync", "tokens/pass"), speeds),
            table(("verdict before", "passes", "ready at it", "waited, passes", "verified", "tokens"), lines),
        )
    )


def main() -> None:
    """Print the account of one pair for each ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accept", type=float, default=0.8)
    parser.add_argument("--ratios", type=float, nargs="+", default=[20, 7], help="draft steps in the time of a pass")
    parser.add_argument("--row-share", type=float, default=0.06, help="of a further node in a step, as a share of it")
    parser.add_argument("--num-answers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for ratio in given.ratios:
        pair = machine(
            given.accept,
            ratio,
            row_share=given.row_share,
            num_answers=given.num_answers,
            num_tokens=given.tokens,
            seed=given.seed,
        )
        print(f"acceptance {given.accept:g}, {ratio:g} steps a pass", simulated_text(pair), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()
