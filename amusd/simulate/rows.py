"""What each schedule came to: a row of the result, a line of the table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from amusd.console import percent, table
from amusd.policies.factory import policy_name
from amusd.simulate.schedules import BEST, TRIED, WAITING, Trial
from amusd.types import Mode


def rows_of(trials: Sequence[Trial], plain: Trial, *, can_branch: bool) -> list[dict[str, Any]]:
    """One for each trial, as the result has them; `plain` and the best blocks are what they are compared with."""
    best_synchronous = next(
        trial
        for trial in trials
        if trial.decoding.mode is Mode.SYNCHRONOUS and trial.num_groups == 1 and trial.choice == BEST
    )
    return [_row(trial, plain, best_synchronous, can_branch=can_branch) for trial in trials]


def _row(trial: Trial, plain: Trial, best_synchronous: Trial, *, can_branch: bool) -> dict[str, Any]:
    decoding, metrics = trial.decoding, trial.outcome.metrics.as_dict()
    policy = policy_name(decoding)
    branches = policy in ("branching", "auto") and can_branch
    ratios = [
        reference.total_ns / answer.total_ns
        for reference, answer in zip(plain.outcome.answers, trial.outcome.answers, strict=True)
    ]
    return {
        "mode": decoding.mode.value,
        "policy": policy,
        "choice": trial.choice,
        "num_groups": trial.num_groups,
        "num_speculative_tokens": decoding.num_speculative_tokens
        if decoding.mode is Mode.SYNCHRONOUS or policy == "windowed"
        else None,
        "min_candidates": decoding.min_candidates if policy in WAITING else None,
        "fan_out": decoding.fan_out if branches else None,
        "rows_per_step": decoding.rows_per_step if branches else None,
        "speedup": trial.over(plain),
        # As `compare` has it: the median over the answers, not the ratio of all time.
        "speedup_vs_autoregressive": statistics.median(ratios),
        "speedup_vs_best_synchronous": None if decoding.mode is Mode.AUTOREGRESSIVE else trial.over(best_synchronous),
        "tokens_per_verification": metrics["mean_acceptance_length"],
        **metrics,
        "tokens_per_second": trial.outcome.throughput.tokens_per_second,
        "mean_latency_ms": statistics.fmean(answer.total_ns for answer in trial.outcome.answers) / 1e6,
    }


def table_of(rows: Sequence[dict[str, Any]], *, in_batches: bool) -> str:
    """For a person: a line for each row."""
    header: tuple[str, ...] = (
        "mode",
        "tokens/s",
        "x plain",
        "x best sync",
        "accepted",
        "tokens/pass",
        "idle t/d",
        "wasted",
    )
    if in_batches:
        header = (*header, "s/answer")
    lines: list[tuple[str, ...]] = []
    for row in rows:
        plain = row["mode"] == Mode.AUTOREGRESSIVE.value
        lines.append(
            (
                _row_name(row),
                f"{row['tokens_per_second']:.1f}",
                f"{row['speedup']:.2f}",
                "" if plain else f"{row['speedup_vs_best_synchronous']:.2f}",
                "" if plain else percent(row["acceptance_rate"]),
                f"{row['tokens_per_verification']:.2f}",
                percent(row["target_idle_fraction"]) + ("" if plain else "/" + percent(row["draft_idle_fraction"])),
                "" if plain else percent(row["wasted_draft_fraction"]),
                *([f"{row['mean_latency_ms'] / 1000:.2f}"] if in_batches else []),
            )
        )
    return table(header, lines)


def _row_name(row: dict[str, Any]) -> str:
    if row["mode"] == Mode.AUTOREGRESSIVE.value:
        return str(row["mode"])
    name = str(row["policy"] or row["mode"])
    if row["num_groups"] > 1:
        name += " in turns"
    knob = row["min_candidates"] if row["num_speculative_tokens"] is None else row["num_speculative_tokens"]
    if knob is None:
        return name
    return f"{name} ({knob}{'' if row['choice'] == TRIED else ', ' + row['choice']})"
