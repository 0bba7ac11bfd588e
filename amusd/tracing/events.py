"""The events that a run records: one class for each name, with its fields.

Times are nanoseconds of the worker's monotonic clock, or the simulation's; lengths are in tokens and count the prompt.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias, get_args

from msgspec import Struct, to_builtins

NO_SEQUENCE = -1
"""Sequence id of what belongs to none."""
_HEADS = ("name", "start_ns", "end_ns", "sequence_id")


def _name_of(kind: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()


class Event(Struct, frozen=True, omit_defaults=True, tag_field="name", tag=_name_of):
    """A span when `end_ns > start_ns`, else an instant. A field with a default is left out if it has that value."""

    start_ns: int
    end_ns: int
    sequence_id: int

    @property
    def duration_ns(self) -> int:
        """0 for an instant."""
        return self.end_ns - self.start_ns

    @property
    def name(self) -> str:
        """The name in the file."""
        return str(self.__struct_config__.tag)

    @property
    def fields(self) -> dict[str, Any]:
        """The recorded values beside name, times and sequence."""
        return {name: value for name, value in to_builtins(self).items() if name not in _HEADS}


class WholeSequence(Event, tag="sequence", frozen=True, kw_only=True):
    """Target: from request to last committed token. Draft: from opening to end."""

    drafter: str | None
    policy: str | None = None
    """The policy's class. This and the fields below: the target only."""
    max_lookahead: int | None = None
    num_prompt_tokens: int | None = None
    finish_reason: str | None = None


class TargetPrefill(Event, frozen=True, kw_only=True):
    """Target: the prompt's forward."""


class TargetPass(Event, frozen=True, kw_only=True):
    """Target: one verification, counted as in `protocol.verification.PassOutcome`."""

    num_candidates: int
    """Candidates on the one path that it was made for."""
    num_judged: int
    num_accepted: int
    num_tokens: int
    committed_length: int
    num_ready: int = 0
    num_alternatives: int = 0
    num_accepted_alternatives: int = 0
    reason: str = ""

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


class TargetWait(Event, frozen=True, kw_only=True):
    """Target: waiting because the policy chose to."""

    reason: str = ""


class DraftLost(Event, frozen=True, kw_only=True):
    """Target: the link to the draft ended."""

    reason: str


class DraftBack(Event, frozen=True, kw_only=True):
    """Target: another draft has taken the place of the lost one."""

    incarnation: int


class TargetGone(Event, frozen=True, kw_only=True):
    """Draft: the link to the target ended."""


class DraftPrefill(Event, frozen=True, kw_only=True):
    """Draft: opening a sequence, the prompt's forward among it."""

    num_tokens: int
    fan_out: int = 1
    """Guesses behind a node; 1: a chain."""


class DraftStep(Event, frozen=True, kw_only=True):
    """Draft: one proposal."""

    num_tokens: int
    """Tokens proposed by a chain, nodes expanded of a tree; may be 0."""
    length: int


class VerdictTaken(Event, frozen=True, kw_only=True):
    """Draft: a verdict taken in."""

    num_discarded: int
    num_adopted: int
    """The target's own tokens that the draft lacked."""
    committed_length: int
    epoch: int
    kept_steps: list[int] | None = None
    """Trees: for each committed token in the tree, the step (from 1) that drafted it; 0: looked up."""

    @property
    def kept_length(self) -> int:
        """Committed length up to which the draft had the tokens itself."""
        return self.committed_length - self.num_adopted


class Advance(VerdictTaken, frozen=True, kw_only=True):
    """Draft: a verdict that agrees with what was drafted."""


class Rollback(VerdictTaken, frozen=True, kw_only=True):
    """Draft: a verdict that makes it throw tokens away."""


class DraftWait(Event, frozen=True, kw_only=True):
    """Draft: waiting at the run-ahead limit, or with nothing to propose."""


class MessageEvent(Event, frozen=True, kw_only=True):
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


class Send(MessageEvent, frozen=True, kw_only=True):
    """Before the message is sent."""


class Receive(MessageEvent, frozen=True, kw_only=True):
    """After the message was received."""

    reception: str | None = None
    num_ready: int | None = None


DRAFT_WORK = (DraftPrefill, DraftStep, VerdictTaken)
TARGET_WORK = (TargetPrefill, TargetPass)
WAITS = (TargetWait, DraftWait)

AnyEvent: TypeAlias = (
    WholeSequence | TargetPrefill | TargetPass | TargetWait | DraftLost | DraftBack | TargetGone
    | DraftPrefill | DraftStep | Advance | Rollback | DraftWait | Send | Receive
)  # fmt: skip
EVENTS: dict[str, type[Event]] = {kind.__struct_config__.tag: kind for kind in get_args(AnyEvent)}
