"""`amusd simulate`: predicts the speed of each schedule from given or measured times.

All schedules run on the same answers, one at a time or in batches. The real workers run on virtual time, without models
or processes.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from amusd.commands.job import Job
from amusd.commands.tables import report, row_name, settings_of
from amusd.config import DecodingConfig, RunConfig
from amusd.drafters.synthetic import ACCEPT_NEXT
from amusd.errors import ConfigError
from amusd.logs import end_progress, show_progress
from amusd.policies.estimates import DRAFT_ROW_SHARE
from amusd.policies.factory import make_policy
from amusd.simulation.calibration import calibrate
from amusd.simulation.cost import NOTHING, Costs, Duration
from amusd.simulation.simulator import Outcome, Simulator
from amusd.simulation.tokens import drawn_answers, replayed_answers

JITTER = 0.05
"""Relative standard deviation of given times. Without jitter draft and target would stay in step."""
NUM_ANSWERS = 4


def run(job: Job) -> int:
    """Predict, keep and show the result; return the exit code. Raises `ConfigError` for missing inputs."""
    result = simulate(job.config, simulator_of(job.config), job.folder / "events")
    return job.conclude(result, report(result["rows"]))


def simulate(config: RunConfig, simulator: Simulator, events_folder: Path) -> dict[str, Any]:
    """Return the documented JSON without `run_dir`.

    The events of the first answer under the configured policy go to `events_folder`.
    """
    schedules = schedules_of(config, can_branch=simulator.can_branch)
    outcomes: dict[DecodingConfig, Outcome] = {}
    for number, decoding in enumerate(schedules, start=1):
        show_progress(row_name(settings_of(decoding)), number, len(schedules))
        outcomes[decoding] = simulator.run(decoding)
    end_progress()
    plain = outcomes[schedules[0]]
    blocks = [outcome for decoding, outcome in outcomes.items() if decoding.mode == "synchronous"]
    best = max(blocks, key=lambda outcome: outcome.tokens_per_second)
    first = replace(simulator, answers=simulator.answers[:1], batch_size=1)
    first.run(replace(config.decoding(), mode="asynchronous"), events_folder=events_folder)
    return {
        "complete": True,
        "rows": [_row(decoding, outcome, plain, best) for decoding, outcome in outcomes.items()],
        "inputs": {
            "acceptance": {"kind": "replay" if config.accept is None else "drawn", "accept": simulator.accept},
            "num_answers": len(simulator.answers),
            "num_tokens": sum(map(len, simulator.answers)),
            "batch_size": simulator.num_slots,
            "costs": simulator.costs.as_dict(),
            "max_candidates_in_a_pass": simulator.max_candidates,
            "accept_next": simulator.accept_next,
            "can_branch": simulator.can_branch,
            "seed": simulator.seed,
        },
    }


def schedules_of(config: RunConfig, *, can_branch: bool) -> list[DecodingConfig]:
    """The schedules to try; plain decoding first, the configured policy last."""
    settings, base = config.simulate, replace(config.decoding(), mode="asynchronous")
    waits = sorted({config.min_candidates, *settings.min_candidates})
    found = [replace(base, mode="autoregressive")]
    for in_blocks in (replace(base, mode="synchronous"), replace(base, policy="windowed")):
        lengths = sorted(settings.synchronous_lengths)
        found += [replace(in_blocks, num_speculative_tokens=length) for length in lengths]
    for policy in ("chain", "branching") if can_branch else ("chain",):
        found += [replace(base, policy=policy, min_candidates=wait) for wait in waits]
    return list(dict.fromkeys([*found, replace(base, policy="auto"), base]))


def _row(decoding: DecodingConfig, outcome: Outcome, plain: Outcome, best_synchronous: Outcome) -> dict[str, Any]:
    metrics = outcome.metrics.as_dict()
    gain = outcome.tokens_per_second / best_synchronous.tokens_per_second
    ratios = [ours.total_ns / theirs.total_ns for ours, theirs in zip(plain.answers, outcome.answers, strict=True)]
    return {
        **settings_of(decoding),
        "speedup": outcome.tokens_per_second / plain.tokens_per_second,
        # As in `compare`: the median over the answers, not the ratio of the total times.
        "speedup_vs_autoregressive": statistics.median(ratios),
        "speedup_vs_best_synchronous": None if decoding.mode == "autoregressive" else gain,
        **metrics,
        "draft_idle_fraction": outcome.draft_idle_fraction,
        "tokens_per_second": outcome.tokens_per_second,
        "mean_latency_s": statistics.fmean(answer.total_ns for answer in outcome.answers) / 1e9,
    }


def simulator_of(config: RunConfig) -> Simulator:
    """Make a simulator from given or measured times and answers; given values win. Raises `ConfigError`.

    Passes are as wide as in `compare` with the same block lengths.
    """
    settings, seed = config.simulate, config.sampling.seed
    make_policy(replace(config.decoding(), mode="asynchronous"))  # raises for a mistake in a user's own policy
    windows = (config.num_speculative_tokens,) if config.policy == "windowed" else ()
    width = config.engine(longest_block=max((*settings.synchronous_lengths, *windows))).max_verify_width
    if config.calibration is not None:
        costs, traces, accept_next = calibrate(Path(config.calibration), config.drafter.kind)
    else:
        needed = ("accept", "verify_ms", "draft_ms")
        if missing := next((name for name in needed if getattr(config, name) is None), None):
            raise ConfigError(f"{missing}: required to simulate without calibration=RUN_DIR")
        costs, traces, accept_next = Costs(passes={}, draft_token=NOTHING), (), None
    if config.accept is None:
        answers = replayed_answers(traces, seed)
    else:
        number, accept_next = max(NUM_ANSWERS, settings.batch_size), None
        answers = drawn_answers(config.accept, num_answers=number, num_tokens=settings.num_tokens, seed=seed)
    return Simulator(
        costs=_costs(config, costs),
        answers=answers,
        max_candidates=width - 1,
        accept_next=ACCEPT_NEXT if accept_next is None else accept_next,
        can_branch=config.drafter.can.tree,
        seed=seed,
        batch_size=settings.batch_size,
    )


def _costs(config: RunConfig, costs: Costs) -> Costs:
    settings = config.simulate
    given: dict[str, Any] = {"knee_rows": settings.knee_rows}
    if config.verify_ms is not None:
        given["passes"] = {0: Duration.of_ms(config.verify_ms, JITTER)}
    if config.draft_ms is not None:
        given |= {"draft_token": Duration.of_ms(config.draft_ms, JITTER), "tree_steps": {}}
    if config.delay_ms is not None:
        given["to_target"] = given["to_draft"] = Duration.of_ms(config.delay_ms)
    costs = replace(costs, **given)
    draft_ms, pass_ms = costs.draft_token.mean_ms, costs.passes[min(costs.passes)].mean_ms
    sequence_ns = settings.sequence_ms * 1e6
    costs = replace(costs, sequence_ns=round(sequence_ns), draft_sequence_ns=round(sequence_ns * draft_ms / pass_ms))
    if costs.tree_steps:
        return costs
    return replace(costs, tree_row_ns=0 if settings.knee_rows else round(DRAFT_ROW_SHARE * draft_ms * 1e6))
