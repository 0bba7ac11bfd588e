"""`amusd simulate`: which schedule would win, and by how much, on a machine that need not be there.

Plain decoding, synchronous blocks and windows of each length, chain and branching with each wait, and `auto`, on the
same answers, one at a time or several together; and the map if one is asked for. The real workers run on virtual time:
no model, no process, no wait.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

from amusd.commands.advice import Option, advice
from amusd.commands.simulate.equal_devices import worth, worth_text
from amusd.commands.simulate.inputs import Inputs, drawn
from amusd.commands.simulate.schedules import (
    TRIED,
    Bench,
    Trial,
    best_of,
    knobs,
    schedule_name,
    steady_bench,
    waiting_policies,
)  # fmt: skip
from amusd.commands.tables import columns_of
from amusd.config import AsynchronousPolicy, RunConfig
from amusd.console import Console, percent, table
from amusd.policies.factory import policy_name
from amusd.simulation.cost import Shared
from amusd.simulation.simulator import Simulator
from amusd.types import Mode

LEGEND = """\
x plain, x best sync: speed over plain decoding and over the best synchronous length; accepted: of the judged candidates
tokens/pass: committed by a target pass; idle t, d: time without work, target and draft; wasted: of the drafted tokens
tokens: of a block or window; waits for: candidates before a pass (min_candidates); chosen: configured, or best tried"""
"""The meaning of the table's names and columns."""
_SHOWN = (
    "tokens_per_second",
    "speedup_vs_autoregressive",
    "speedup_vs_best_synchronous",
    "acceptance_rate",
    "mean_acceptance_length",
    "target_idle_fraction",
    "draft_idle_fraction",
    "wasted_draft_fraction",
)
GRID_ACCEPTS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Acceptance rates of the map."""
GRID_RATIOS = (2.0, 4.0, 8.0, 16.0)
"""Draft steps per target pass of the map; the draft's time for a token follows from it."""


def simulate(config: RunConfig, inputs: Inputs, console: Console, events_folder: Path) -> dict[str, Any]:
    """Return the documented JSON without `run_dir`: all rows, and the map if one is asked for.

    The events of the first answer, decoded alone under the configured policy, are written to `events_folder`.
    """
    settings = config.simulate
    waiting = waiting_policies(inputs.simulator)
    waits = {config.min_candidates, *settings.min_candidates}
    is_own = config.policy not in get_args(AsynchronousPolicy)
    num_trials = 2 + 2 * len(set(settings.synchronous_lengths)) + len(waiting) * len(waits) + is_own
    tries = steady_bench if inputs.acceptance["kind"] == "drawn" else Bench
    bench = tries(inputs.simulator, config.decoding(), console.steps(num_trials))
    simulator = bench.simulator
    plain = bench.plain()
    own = [bench.asynchronous(config.policy)] if is_own else []
    lengths = settings.synchronous_lengths
    trials = [plain, *bench.synchronous(lengths), *bench.windowed(lengths)]
    for policy in waiting:
        trials += [bench.asynchronous(policy), *bench.tuned(policy, settings.min_candidates)]
    trials += [bench.asynchronous("auto"), *own]
    best = best_of(trials)  # of synchronous blocks, which come first
    result: dict[str, Any] = {
        "complete": True,
        "rows": [_row(trial, plain, best, can_branch=simulator.can_branch) for trial in trials],
        "inputs": replace(inputs, simulator=simulator).as_dict(),
    }
    if settings.rank_speedup is not None:
        numbers = settings.rank_speedup, settings.num_target_devices
        result["equal_devices"] = worth(*numbers, simulator, config.decoding(), *lengths)
    if settings.grid:
        result["grid"] = grid_of(config, simulator, console)
    console.clear_progress()
    first = replace(simulator, answers=simulator.answers[:1], batch_size=1)
    first.run(bench.asynchronous(config.policy).decoding, events_folder=events_folder)
    return result


def simulate_text(result: dict[str, Any]) -> str:
    """Return what `simulate` found as text for a person."""
    batch_size = result["inputs"]["batch_size"]
    texts = [_table(result["rows"], in_batches=batch_size > 1)]
    if batch_size > 1:
        texts.insert(0, f"{batch_size} answers at a time: tokens/s of all together, s/answer of each")
    if "equal_devices" in result:
        texts.append(worth_text(result["equal_devices"], batch_size))
    if "grid" in result:
        texts.append(grid_text(result["grid"]))
    texts.append(advice([Option(row, row["speedup"], row["relative_error"]) for row in result["rows"]]))
    return "\n\n".join(texts)


def _row(trial: Trial, plain: Trial, best_synchronous: Trial, *, can_branch: bool) -> dict[str, Any]:
    decoding, metrics = trial.decoding, trial.outcome.metrics.as_dict()
    branches = policy_name(decoding) in ("branching", "auto") and can_branch
    ratios = [
        reference.total_ns / answer.total_ns
        for reference, answer in zip(plain.outcome.answers, trial.outcome.answers, strict=True)
    ]
    return {
        **knobs(decoding),
        "choice": trial.choice,
        "fan_out": decoding.fan_out if branches else None,
        "rows_per_step": decoding.rows_per_step if branches else None,
        "speedup": trial.over(plain),
        # As in `compare`: the median over the answers, not the ratio of all time.
        "speedup_vs_autoregressive": statistics.median(ratios),
        "speedup_vs_best_synchronous": None if decoding.mode is Mode.AUTOREGRESSIVE else trial.over(best_synchronous),
        "tokens_per_verification": metrics["mean_acceptance_length"],
        **metrics,
        "draft_idle_fraction": trial.outcome.draft_idle_fraction,
        "tokens_per_second": trial.outcome.throughput.tokens_per_second,
        "mean_latency_ms": statistics.fmean(answer.total_ns for answer in trial.outcome.answers) / 1e6,
        "relative_error": trial.outcome.relative_error,
    }


def _table(rows: Sequence[dict[str, Any]], *, in_batches: bool) -> str:
    """Return a line for each schedule, and what the columns mean."""
    rows = [
        {**row, "speedup_vs_autoregressive": row["speedup"], "mean_latency_s": row["mean_latency_ms"] / 1000}
        for row in rows
    ]
    columns = columns_of(rows, [*_SHOWN, *(["mean_latency_s"] if in_batches else [])])
    chosen: dict[str, set[str]] = {}
    for row in rows:
        chosen.setdefault(schedule_name(row), set()).add(row["choice"])
    lines = []
    for name, row in {schedule_name(row): row for row in rows}.items():
        has_choice = row["num_speculative_tokens"] is not None or row["min_candidates"] is not None
        choice = ", ".join(sorted(chosen[name] - {TRIED})) if has_choice else ""
        lines.append((name, *(column.text(row) for column in columns), choice))
    return f"{table(('schedule', *(column.heading for column in columns), 'chosen'), lines)}\n\n{LEGEND}"


def grid_of(config: RunConfig, simulator: Simulator, console: Console) -> list[dict[str, Any]]:
    """Return a cell for each acceptance and each ratio of speeds.

    A cell has the tuned schedules, which of them wins, its lead, and `auto` beside them.
    """
    settings = config.simulate
    cells = list(product(GRID_ACCEPTS, GRID_RATIOS))
    report = console.steps(len(cells))
    found = []
    for accept, ratio in cells:
        report(f"acceptance {accept:g}, {ratio:.4g} draft steps a pass")
        machine = _with_ratio(simulator, ratio, settings.jitter)
        bench = steady_bench(replace(machine, answers=drawn(config, accept)), config.decoding())
        found.append({"accept": accept, "ratio": ratio, **_grid_cell(config, bench)})
    return found


def _with_ratio(simulator: Simulator, ratio: float, jitter: float) -> Simulator:
    """Return the machine with a draft that takes `ratio` steps in the time of a pass."""
    costs = simulator.costs
    draft_ms = costs.passes[min(costs.passes)].alone.mean_ms / ratio
    costs = replace(
        costs,
        draft_token=Shared.of_ms(draft_ms, jitter),
        tree_steps={},
        tree_row_ns=round(costs.tree_row_share * draft_ms * 1e6),
    )
    return replace(simulator, costs=costs)


def _grid_cell(config: RunConfig, bench: Bench) -> dict[str, Any]:
    settings, waiting = config.simulate, waiting_policies(bench.simulator)
    plain = bench.plain()
    synchronous = best_of(bench.synchronous(settings.synchronous_lengths))
    tuned = {"windowed": best_of(bench.windowed(settings.synchronous_lengths))}
    tuned |= {policy: best_of(bench.tuned(policy, settings.min_candidates)) for policy in waiting}
    speedups: dict[str, float] = {"autoregressive": 1.0, "synchronous": synchronous.over(plain)}
    speedups |= {policy: trial.over(plain) for policy, trial in tuned.items()}
    ranked = sorted(speedups, key=lambda name: speedups[name], reverse=True)
    return {
        "speedups": speedups,
        "num_speculative_tokens": synchronous.decoding.num_speculative_tokens,
        "window": tuned["windowed"].decoding.num_speculative_tokens,
        "min_candidates": {policy: tuned[policy].decoding.min_candidates for policy in waiting},
        "winner": ranked[0],
        "margin": speedups[ranked[0]] / speedups[ranked[1]] - 1,
        "auto": bench.asynchronous("auto").over(plain),
    }


def grid_text(cells: Sequence[dict[str, Any]]) -> str:
    """Return a table: for each acceptance the winners, their speed-ups and their leads over the next, and a legend."""
    header = ("accept \\ verify/draft", *(f"{ratio:g}" for ratio in dict.fromkeys(cell["ratio"] for cell in cells)))
    lines: dict[float, list[str]] = {}
    for cell in cells:
        shown = f"{cell['winner']} {max(cell['speedups'].values()):.2f} (+{percent(cell['margin'])})"
        lines.setdefault(cell["accept"], [f"{cell['accept']:g}"]).append(shown)
    legend = "for each acceptance and draft steps per pass: the fastest, times plain decoding, its lead over the next"
    return f"{table(header, [*map(tuple, lines.values())])}\n\n{legend}"
