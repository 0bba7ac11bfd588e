"""Every schedule on one simulated machine: plain decoding, blocks, windows, and each policy that waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from amusd.config import AsynchronousPolicy, DecodingConfig
from amusd.policies.factory import policy_name
from amusd.simulation.simulator import Outcome, Simulator
from amusd.types import Mode

CONFIGURED, TRIED, BEST = "configured", "tried", "best"
"""Why a row is there: its knobs are the configured ones, one of several values tried, or the fastest of those."""

FEWEST_ANSWERS = 4
"""Answers that every schedule decodes at least, where there are so many."""
LARGEST_ERROR = 0.015
"""Relative standard error of a speed that is good enough."""
WAITING: tuple[AsynchronousPolicy, ...] = ("chain", "branching")
"""Policies that are tried with every `min_candidates`."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One schedule and its outcome."""

    decoding: DecodingConfig
    outcome: Outcome
    choice: str

    def over(self, other: Trial) -> float:
        """Return how many times as fast as `other` it is."""
        return self.outcome.throughput.over(other.outcome.throughput)


@dataclass
class Bench:
    """Tries schedules on one simulated machine, each once."""

    simulator: Simulator
    decoding: DecodingConfig
    """The configured schedule; each trial changes the knobs that it is about."""
    report: Callable[[str], None] = lambda _name: None
    _outcomes: dict[DecodingConfig, Outcome] = field(default_factory=dict)

    def plain(self) -> Trial:
        """Try the target alone."""
        return self._trial(CONFIGURED, mode=Mode.AUTOREGRESSIVE)

    def synchronous(self, lengths: Iterable[int]) -> list[Trial]:
        """Try blocks of each length; the fastest is marked."""
        return self._best_of("num_speculative_tokens", lengths, mode=Mode.SYNCHRONOUS)

    def windowed(self, lengths: Iterable[int]) -> list[Trial]:
        """Try windows of each length; the fastest is marked."""
        return self._best_of("num_speculative_tokens", lengths, mode=Mode.ASYNCHRONOUS, policy="windowed")

    def asynchronous(self, policy: str) -> Trial:
        """Try `policy` with the configured knobs."""
        return self._trial(CONFIGURED, mode=Mode.ASYNCHRONOUS, policy=policy)

    def tuned(self, policy: AsynchronousPolicy, waits: Iterable[int]) -> list[Trial]:
        """Try `policy` with each `min_candidates`; the fastest is marked."""
        return self._best_of("min_candidates", waits, mode=Mode.ASYNCHRONOUS, policy=policy)

    def _best_of(self, knob: str, values: Iterable[int], **changes: Any) -> list[Trial]:
        trials = [self._trial(TRIED, **changes, **{knob: value}) for value in sorted(set(values))]
        fastest = max(trials, key=lambda trial: trial.outcome.throughput.tokens_per_second)
        return [replace(trial, choice=BEST) if trial is fastest else trial for trial in trials]

    def _trial(self, choice: str, **changes: Any) -> Trial:
        decoding = replace(self.decoding, **changes)
        if decoding not in self._outcomes:
            self.report(schedule_name(knobs(decoding)))
            self._outcomes[decoding] = self.simulator.run(decoding)
        return Trial(decoding, self._outcomes[decoding], choice)


def steady_bench(
    simulator: Simulator, decoding: DecodingConfig, report: Callable[[str], None] = lambda _name: None
) -> Bench:
    """Return a bench with as few of the answers as tell the speed of `auto` to `LARGEST_ERROR`.

    `auto` scatters the most. The number begins with `FEWEST_ANSWERS`, or a batch, and doubles up to all answers.
    """
    number = max(FEWEST_ANSWERS, simulator.num_slots)
    while True:
        bench = Bench(replace(simulator, answers=simulator.answers[:number]), decoding, report)
        if bench.asynchronous("auto").outcome.relative_error <= LARGEST_ERROR or number >= len(simulator.answers):
            return bench
        number *= 2


def waiting_policies(simulator: Simulator) -> tuple[AsynchronousPolicy, ...]:
    """Return those of `WAITING` that this machine can run."""
    return WAITING if simulator.can_branch else ("chain",)


def best_of(trials: Iterable[Trial]) -> Trial:
    """Return the trial that is marked as the best."""
    return next(trial for trial in trials if trial.choice == BEST)


def knobs(decoding: DecodingConfig) -> dict[str, Any]:
    """Return what names a schedule in a result; None where a knob is not its own."""
    policy = policy_name(decoding)
    in_blocks = decoding.mode is Mode.SYNCHRONOUS or policy == "windowed"
    return {
        "mode": decoding.mode.value,
        "policy": policy,
        "num_speculative_tokens": decoding.num_speculative_tokens if in_blocks else None,
        "min_candidates": decoding.min_candidates if policy in WAITING else None,
    }


def schedule_name(row: Mapping[str, Any]) -> str:
    """Return the name of a schedule for people; `row` has its `knobs`."""
    name, length = str(row["policy"] or row["mode"]), row["num_speculative_tokens"]
    if length is not None:
        return f"{name}, {length} token{'s' if length > 1 else ''}"
    return name if row["min_candidates"] is None else f"{name}, waits for {row['min_candidates']}"
