"""Counts of one answer while the target makes it; `metrics` freezes them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from amusd.protocol.verification import PassOutcome
from amusd.tracing.metrics import DraftCounts, GenerationMetrics


@dataclass
class TargetCounts:
    """What a target has done since it was started, over all sequences, those at work included."""

    num_passes: int = 0
    """Each counts once, however many sequences it is over."""
    num_tokens: int = 0
    num_drafts: int = 0
    """Passes that had candidates to judge, once for each sequence."""
    num_verified: int = 0
    """Candidates judged."""
    num_accepted: int = 0
    num_tokens_alone: int = 0
    """Committed while the draft that was to help was lost or silent."""

    def add(self, outcome: PassOutcome, *, is_alone: bool) -> None:
        """Count what a pass did for one sequence."""
        self.num_tokens += outcome.num_tokens
        self.num_drafts += outcome.num_judged > 0
        self.num_verified += outcome.num_judged
        self.num_accepted += outcome.num_accepted
        self.num_tokens_alone += outcome.num_tokens if is_alone else 0


@dataclass
class Tally:
    """Everything that the target counts about one sequence. Times in nanoseconds of one clock."""

    start_ns: int
    """When the request began."""
    num_prompt_tokens: int
    prefill_ns: int = 0
    wait_ns: int = 0
    """Because the policy chose to wait."""
    num_refused: int = 0
    num_stale_candidates: int = 0
    num_draft_losses: int = 0
    num_draft_restarts: int = 0
    num_tokens_alone: int = 0
    draft: DraftCounts | None = None
    """The newest that the draft has said."""
    num_tokens: int = 0
    _first_ns: int | None = None
    _last_ns: int | None = None
    _pass_ns: int = 0
    _num_passes: int = 0
    _num_drafts: int = 0
    _num_verified: int = 0
    _num_accepted: int = 0
    _num_late_accepted: int = 0
    _num_alternatives: int = 0
    _num_accepted_alternatives: int = 0
    _accepted_by_position: list[int] = field(default_factory=list)
    _acceptance: Counter[tuple[int, int]] = field(default_factory=Counter)
    _chunk_gaps_ns: list[int] = field(default_factory=list)

    @property
    def last_ns(self) -> int:
        """When the last tokens were committed; before the first, when the prompt was in the cache."""
        return self.start_ns + self.prefill_ns if self._last_ns is None else self._last_ns

    def passed(self, now_ns: int, duration_ns: int, outcome: PassOutcome) -> None:
        """A pass is over, and its tokens are committed now."""
        if self._last_ns is not None:
            self._chunk_gaps_ns.append(now_ns - self._last_ns)
        self._last_ns = now_ns
        self._first_ns = now_ns if self._first_ns is None else self._first_ns
        self._pass_ns += duration_ns
        self._num_passes += 1
        self.num_tokens += outcome.num_tokens
        # As elsewhere in the field, candidates behind the first rejected one count as verified.
        self._num_verified += outcome.num_judged
        self._num_drafts += outcome.num_judged > 0
        self._num_accepted += outcome.num_accepted
        self._num_late_accepted += outcome.num_late_accepted
        self._num_alternatives += outcome.num_alternatives
        self._num_accepted_alternatives += outcome.num_accepted_alternatives
        if outcome.num_judged:
            self._acceptance[outcome.num_judged, outcome.num_accepted] += 1
        self._accepted_by_position.extend([0] * (outcome.num_accepted - len(self._accepted_by_position)))
        for position in range(outcome.num_accepted):
            self._accepted_by_position[position] += 1

    def metrics(self) -> GenerationMetrics:
        """The counts so far."""
        first_ns = self.last_ns if self._first_ns is None else self._first_ns
        return GenerationMetrics(
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self.num_tokens,
            first_token_ns=first_ns - self.start_ns,
            total_ns=self.last_ns - self.start_ns,
            prefill_ns=self.prefill_ns,
            pass_ns=self._pass_ns,
            wait_ns=self.wait_ns,
            num_passes=self._num_passes,
            num_drafts=self._num_drafts,
            num_verified=self._num_verified,
            num_accepted=self._num_accepted,
            num_late_accepted=self._num_late_accepted,
            num_alternatives=self._num_alternatives,
            num_accepted_alternatives=self._num_accepted_alternatives,
            accepted_by_position=tuple(self._accepted_by_position),
            acceptance=dict(self._acceptance),
            chunk_gaps_ns=tuple(self._chunk_gaps_ns),
            num_stale_candidates=self.num_stale_candidates,
            num_refused=self.num_refused,
            num_draft_restarts=self.num_draft_restarts,
            num_tokens_alone=self.num_tokens_alone,
            # what a lost draft did is not known to its end, and no other one speaks for it
            draft=None if self.num_draft_losses else self.draft,
        )
