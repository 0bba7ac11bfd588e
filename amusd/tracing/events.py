"""The events that a run records: one class for each name, with its fields.

Times are nanoseconds of the worker's monotonic clock, or the simulation's; lengths are in tokens and count the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

NO_SEQUENCE = -1
"""Sequence id of what belongs to none."""


@dataclass(frozen=True, slots=True)
class Event:
    """A span when `end_ns > start_ns`, else an instant. A field with a default is optional."""

    name: ClassVar[str]
    start_ns: int
    end_ns: int
    sequence_id: int

    @property
    def duration_ns(self) -> int:
        """0 for an instant."""
        return self.end_ns - self.start_ns

    @property
    def fields(self) -> dict[str, Any]:
        """The recorded values beside name, times and sequence."""
        own = {field.name: (getattr(self, field.name), field.default) for field in fields(self)[_NUM_HEADS:]}
        return {name: value for name, (value, default) in own.items() if value is not None or default is not None}


_NUM_HEADS = len(fields(Event))


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker(Event):
    """Both workers: the first event of a file."""

    name = "worker"
    host: str
    """Equal exactly for workers that share a monotonic clock."""
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSequence(Event):
    """Target: from request to last committed token. Draft: from opening to end."""

    name = "sequence"
    drafter: str | None
    policy: str | None = None
    """The policy's class. This and the fields below: the target only."""
    max_lookahead: int | None = None
    num_prompt_tokens: int | None = None
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPrefill(Event):
    """Target: the prompt's forward."""

    name = "target_prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetPass(Event):
    """Target: one verification, counted as in `protocol.verification.PassOutcome`."""

    name = "target_pass"
    num_candidates: int
    """Candidates on the one path that it was made for."""
    num_judged: int
    num_accepted: int
    num_tokens: int
    committed_length: int
    num_ready: int = 0
    num_alternatives: int = 0
    num_accepted_alternatives: int = 0
    reason: str | None = None

    @property
    def num_scored(self) -> int:
        """Candidates in its forward: those on the path and the alternatives."""
        return self.num_candidates + self.num_alternatives

    @property
    def start_length(self) -> int:
        """The committed length before the pass."""
        return self.committed_length - self.num_tokens

    @property
    def has_rejected(self) -> bool:
        """Whether a candidate stood where the target chose another token."""
        return self.num_accepted < min(self.num_judged, self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetWait(Event):
    """Target: waiting because the policy chose to."""

    name = "target_wait"
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLost(Event):
    """Target: the link to the draft ended."""

    name = "draft_lost"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBack(Event):
    """Target: another draft has taken the place of the lost one."""

    name = "draft_back"
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetGone(Event):
    """Draft: the link to the target ended."""

    name = "target_gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPrefill(Event):
    """Draft: opening a sequence, the prompt's forward among it."""

    name = "draft_prefill"
    num_tokens: int
    fan_out: int = 1
    """Guesses behind a node; 1: a chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStep(Event):
    """Draft: one proposal."""

    name = "draft_step"
    num_tokens: int
    """Tokens proposed by a chain, nodes expanded of a tree; may be 0."""
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictTaken(Event):
    """Draft: a verdict taken in."""

    num_discarded: int
    num_adopted: int
    """The target's own tokens that the draft lacked."""
    committed_length: int
    epoch: int
    kept_steps: Sequence[int] | None = None
    """Trees: for each committed token in the tree, the step (from 1) that drafted it; 0: looked up."""

    @property
    def kept_length(self) -> int:
        """Committed length up to which the draft had the tokens itself."""
        return self.committed_length - self.num_adopted


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance(VerdictTaken):
    """Draft: a verdict that agrees with what was drafted."""

    name = "advance"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback(VerdictTaken):
    """Draft: a verdict that makes it throw tokens away."""

    name = "rollback"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWait(Event):
    """Draft: waiting at the run-ahead limit, or with nothing to propose."""

    name = "draft_wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageEvent(Event):
    """Both workers: a message, with its own fields."""

    message: str
    """`open`, `candidate`, `verdict`, `features`, `close`, `progress` or `shutdown`."""
    num_tokens: int | None = None
    first: int | None = None
    base: int | None = None
    start: int | None = None
    """Verdicts, as `num_accepted` and `epoch`, and features."""
    num_accepted: int | None = None
    epoch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Send(MessageEvent):
    """Before the message is sent."""

    name = "send"


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive(MessageEvent):
    """After the message was received."""

    name = "receive"
    reception: str | None = None
    num_ready: int | None = None


DRAFT_WORK = (DraftPrefill, DraftStep, VerdictTaken)
TARGET_WORK = (TargetPrefill, TargetPass)
WAITS = (TargetWait, DraftWait)

EVENTS: dict[str, type[Event]] = {
    kind.name: kind
    for kind in (
        Worker, WholeSequence, TargetPrefill, TargetPass, TargetWait, DraftLost, DraftBack, TargetGone,
        DraftPrefill, DraftStep, Advance, Rollback, DraftWait, Send, Receive,
    )
}  # fmt: skip


def event_of(name: str, start_ns: int, end_ns: int, sequence_id: int, own: dict[str, Any]) -> Event:
    """The event that a worker of this version has recorded. Raises `KeyError` or `TypeError` for any other."""
    return EVENTS[name](start_ns, end_ns, sequence_id, **own)


def event_of_line(record: Any) -> Event:
    """The event of a JSON line. Raises `ValueError` for a line that is none."""
    try:
        return EVENTS[record["name"]](**{name: record[name] for name in record if name not in ("name", "role")})
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an event: {record!r:.100}") from error
