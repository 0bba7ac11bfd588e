"""The events that a run records, and the fields of each.

Times are nanoseconds of the worker's monotonic clock, or the simulation's; lengths are in tokens and count the prompt.
A plain `Event` is the target's `target_prefill`, `target_wait` (because the policy chose to), `draft_lost` and
`draft_back`, or the draft's `draft_wait` (at the run-ahead limit, or with nothing to propose) and `target_gone`.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

from msgspec import Struct, to_builtins

NO_SEQUENCE = -1
"""Sequence id of events without a sequence."""
_HEADS = ("name", "start_ns", "end_ns", "sequence_id")
EventName: TypeAlias = Literal[
    "sequence", "target_prefill", "target_pass", "target_wait", "draft_lost", "draft_back", "draft_prefill",
    "draft_step", "draft_wait", "advance", "rollback", "target_gone", "send", "receive",
]  # fmt: skip


class Event(Struct, frozen=True, omit_defaults=True):
    """A span when `end_ns > start_ns`, else an instant. A field with a default is left out if it has that value."""

    name: EventName
    start_ns: int
    end_ns: int
    sequence_id: int
    reason: str = ""
    """Why the policy waited or began this pass, or why the draft was lost."""
    incarnation: int | None = None
    """`draft_back`: incarnation of the next draft."""

    @property
    def duration_ns(self) -> int:
        """0 for an instant."""
        return self.end_ns - self.start_ns

    @property
    def fields(self) -> dict[str, Any]:
        """The recorded values beside name, times and sequence."""
        return {name: value for name, value in to_builtins(self).items() if name not in _HEADS}


class WholeSequence(Event, frozen=True, kw_only=True):
    """`sequence`. Target: from admission to last committed token. Draft: from opening to end."""

    drafter: str | None
    policy: str | None = None
    """Target only, as are the fields below."""
    max_lookahead: int | None = None
    num_prompt_tokens: int | None = None
    finish_reason: str | None = None


class TargetPass(Event, frozen=True, kw_only=True):
    """`target_pass`: one verification, counted as in `protocol.verification.PassOutcome`."""

    num_candidates: int
    """Candidates on the likeliest path."""
    num_judged: int
    num_accepted: int
    num_tokens: int
    committed_length: int
    num_ready: int = 0
    num_alternatives: int = 0
    num_accepted_alternatives: int = 0

    @property
    def num_scored(self) -> int:
        """Candidates in the pass, alternatives included."""
        return self.num_candidates + self.num_alternatives

    @property
    def start_length(self) -> int:
        """The committed length before the pass."""
        return self.committed_length - self.num_tokens

    @property
    def has_rejected(self) -> bool:
        """Whether a candidate stood where the target chose another token."""
        return self.num_accepted < min(self.num_judged, self.num_tokens)


class DraftPrefill(Event, frozen=True, kw_only=True):
    """`draft_prefill`: opening a sequence, with the prompt's forward."""

    num_tokens: int
    fan_out: int = 1
    """Guesses after a node; 1: a chain."""


class DraftStep(Event, frozen=True, kw_only=True):
    """`draft_step`: one step of the drafter."""

    num_tokens: int
    """Tokens added to a chain, or computed nodes of a tree; may be 0."""
    length: int
    """Number of committed tokens and nodes after the step."""


class VerdictTaken(Event, frozen=True, kw_only=True):
    """Draft: a verdict taken in; `advance` if it agrees with what was drafted, else `rollback`."""

    num_discarded: int
    num_adopted: int
    """Committed tokens that the draft lacked."""
    committed_length: int
    kept_steps: list[int] | None = None
    """Trees: for each committed token in the tree, the step (from 1) that drafted it; 0: looked up."""

    @property
    def kept_length(self) -> int:
        """Committed length up to which the draft had drafted the tokens."""
        return self.committed_length - self.num_adopted


class MessageEvent(Event, frozen=True, kw_only=True):
    """Both workers: a message with its own fields, before it is sent (`send`) or after it came (`receive`)."""

    message: str
    """`open`, `candidate`, `verdict`, `features`, `close`, `progress`, `refused` or `shutdown`."""
    num_tokens: int | None = None
    first: int | None = None
    base: int | None = None
    start: int | None = None
    """Verdicts and features only; `epoch`: verdicts."""
    epoch: int | None = None
    reception: str | None = None
    """Received candidates: `taken`, `contradicted`, `stale` or `refused`."""


DRAFT_WORK = ("draft_prefill", "draft_step", "advance", "rollback")
TARGET_WORK = ("target_prefill", "target_pass")

EVENT_CLASSES: dict[str, type[Event]] = {
    **dict.fromkeys(get_args(EventName), Event),
    "sequence": WholeSequence,
    "target_pass": TargetPass,
    "draft_prefill": DraftPrefill,
    "draft_step": DraftStep,
    "advance": VerdictTaken,
    "rollback": VerdictTaken,
    "send": MessageEvent,
    "receive": MessageEvent,
}
"""The class of each event by its name."""
