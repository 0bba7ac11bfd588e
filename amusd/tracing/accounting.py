"""The wall time of a worker by named parts that add up to it: it does one thing at a time for a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from amusd.tracing.drafted import Fate, judge_steps
from amusd.tracing.events import (
    Advance,
    DraftPrefill,
    DraftWait,
    Event,
    Rollback,
    TargetPass,
    TargetPrefill,
    TargetWait,
    WholeSequence,
)  # fmt: skip

TARGET_PARTS = ("prefill", "full_passes", "partial_passes", "passes_without_candidates", "waits", "host")
"""Parts of the target's time, from the request to the last committed tokens. A full pass has as many candidates as it
can hold; the target waits because the policy chose to; `host` is all the rest."""
DRAFT_PARTS = ("prefill", "accepted_steps", "wasted_steps", "verdicts", "waits", "host")
"""Parts of the draft's time, from the opening of the sequence to its end. `accepted_steps` is the share of each step
whose tokens were accepted; the draft waits at the run-ahead limit, or with nothing to propose."""
_PARTS: dict[type[Event], str] = {
    TargetPrefill: "prefill",
    TargetWait: "waits",
    DraftPrefill: "prefill",
    Advance: "verdicts",
    Rollback: "verdicts",
    DraftWait: "waits",
}


Account: TypeAlias = dict[str, int]
"""The nanoseconds of each part. Their sum is the wall time."""


def accounts(target: Sequence[Event], draft: Sequence[Event]) -> dict[str, Account]:
    """The accounts of one sequence, by worker, from the events of both.

    A worker whose events do not tell how the sequence went has none. The target's say what became of drafted tokens.
    """
    steps = {"accepted_steps": 0, "wasted_steps": 0}
    for step in judge_steps(draft, target):
        duration_ns = step.event.duration_ns
        useful_ns = duration_ns * step.count(Fate.ACCEPTED) // max(1, len(step.fates))
        steps["accepted_steps"] += useful_ns
        steps["wasted_steps"] += duration_ns - useful_ns
    found = {"target": _account(target, TARGET_PARTS, {}), "draft": _account(draft, DRAFT_PARTS, steps)}
    return {role: account for role, account in found.items() if account is not None}


def fractions(account: Account) -> dict[str, float]:
    """Each part as a share of the wall time."""
    wall_ns = sum(account.values())
    return {name: part / wall_ns if wall_ns else 0.0 for name, part in account.items()}


def _part(event: Event) -> str | None:
    """The part that a span is; None for a draft step, whose tokens split it in two, and for other events."""
    if not isinstance(event, TargetPass):
        return _PARTS.get(type(event))
    if event.num_candidates == 0:
        return "passes_without_candidates"
    return "full_passes" if event.num_scored >= event.max_candidates else "partial_passes"


def _account(events: Sequence[Event], names: Sequence[str], steps: Mapping[str, int]) -> Account | None:
    lives = [event for event in events if isinstance(event, WholeSequence)]  # several of a draft that was lost
    if not lives:
        return None
    found = dict.fromkeys(names, 0) | dict(steps)
    for event in events:
        if (name := _part(event)) is not None:
            found[name] += event.duration_ns
    found["host"] = lives[-1].end_ns - lives[0].start_ns - sum(found.values())
    return found
