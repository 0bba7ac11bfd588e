"""The wall time of a worker by named parts that add up to it.

A worker does one thing at a time, so spans of one sequence never overlap; if they did, the parts would add up to more
than the wall time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

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
from amusd.tracing.timeline import Timeline, by_sequence

TARGET_PARTS = ("prefill", "full_passes", "partial_passes", "passes_without_candidates", "waits", "host")
"""Parts of the target's time, from the request to the last committed tokens. A full pass has as many candidates as it
can hold; the target waits because the policy chose to; `host` is everything between the others."""
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


@dataclass(frozen=True, slots=True)
class Account:
    """The wall time of one worker, and its parts by name. Nanoseconds."""

    wall_ns: int
    parts: dict[str, int]

    def fractions(self) -> dict[str, float]:
        """Each part as a share of the wall time."""
        return {name: part / self.wall_ns if self.wall_ns else 0.0 for name, part in self.parts.items()}


def target_account(events: Sequence[Event]) -> Account | None:
    """The account of the target, from its events of one sequence; None if they do not tell how the sequence went."""
    parts = [(event, {name: event.duration_ns}) for event in events if (name := _part(event)) is not None]
    return _account(events, parts, TARGET_PARTS)


def draft_account(draft: Sequence[Event], target: Sequence[Event]) -> Account | None:
    """The account of the draft, from its events of one sequence; the target's say what became of its tokens.

    None as above.
    """
    parts = [(event, {name: event.duration_ns}) for event in draft if (name := _part(event)) is not None]
    for step in judge_steps(draft, target):
        duration_ns = step.event.duration_ns
        useful_ns = duration_ns * step.count(Fate.ACCEPTED) // max(1, len(step.fates))
        parts.append((step.event, {"accepted_steps": useful_ns, "wasted_steps": duration_ns - useful_ns}))
    return _account(draft, parts, DRAFT_PARTS)


def accounts(target: Sequence[Event], draft: Sequence[Event]) -> dict[str, Account]:
    """The accounts of one sequence, by worker; without a worker that recorded none."""
    found = {"target": target_account(target), "draft": draft_account(draft, target)}
    return {role: account for role, account in found.items() if account is not None}


def time_fractions(timeline: Timeline, sequence_ids: Collection[int]) -> dict[str, dict[str, float] | None]:
    """Each part as a share of the wall time of several sequences together, by worker; None for one without events."""
    target, draft = by_sequence(timeline.target), by_sequence(timeline.draft)
    each = [accounts(target.get(id_, ()), draft.get(id_, ())) for id_ in sequence_ids]
    found: dict[str, dict[str, float] | None] = {}
    for role in ("target", "draft"):
        own = [account[role] for account in each if role in account]
        found[role] = _sum(own).fractions() if own else None
    return found


def _part(event: Event) -> str | None:
    """The part that a span is; None for a step, which what became of its tokens splits in two, and for other events."""
    if not isinstance(event, TargetPass):
        return _PARTS.get(type(event))
    if event.num_candidates == 0:
        return "passes_without_candidates"
    return "full_passes" if event.num_scored >= event.max_candidates else "partial_passes"


def _account(
    events: Iterable[Event], parts: Sequence[tuple[Event, dict[str, int]]], names: Iterable[str]
) -> Account | None:
    lives = [event for event in events if isinstance(event, WholeSequence)]  # several of a draft that was lost
    if not lives:
        return None
    found = dict.fromkeys(names, 0)
    start_ns, end_ns = lives[0].start_ns, lives[-1].end_ns
    reached_ns = start_ns
    for event, shares in sorted(parts, key=lambda part: part[0].start_ns):
        found["host"] += max(0, event.start_ns - reached_ns)
        for name, share in shares.items():
            found[name] += share
        reached_ns = max(reached_ns, event.end_ns)
    found["host"] += max(0, end_ns - reached_ns)
    return Account(end_ns - start_ns, found)


def _sum(each: Sequence[Account]) -> Account:
    parts: Counter[str] = Counter()
    for account in each:
        parts.update(account.parts)
    return Account(sum(account.wall_ns for account in each), dict(parts))
