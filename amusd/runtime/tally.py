"""Counts of one generation while it runs; `metrics` freezes them."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from amusd.protocol.verification import PassOutcome
from amusd.tracing.metrics import DraftCounts, GenerationMetrics


@dataclass
class Tally:
    """Everything the target counts about one sequence. Created when the request starts."""

    num_prompt_tokens: int = 0
    num_refused: int = 0
    num_stale_candidates: int = 0
    num_draft_losses: int = 0
    num_draft_restarts: int = 0
    num_tokens_alone: int = 0
    draft: DraftCounts | None = None
    """The newest that the draft has said."""
    _start_ns: int = field(default_factory=time.monotonic_ns)
    _first_ns: int | None = None
    _last_ns: int | None = None
    _prefill_ns: int = 0
    _pass_ns: int = 0
    _wait_ns: int = 0
    _num_tokens: int = 0
    _num_passes: int = 0
    _num_drafts: int = 0
    _num_verified: int = 0
    _num_accepted: int = 0
    _num_late_accepted: int = 0
    _num_alternatives: int = 0
    _num_rescued: int = 0
    _accepted_by_position: list[int] = field(default_factory=list)
    _acceptance: Counter[tuple[int, int]] = field(default_factory=Counter)
    _chunk_gaps_ns: list[int] = field(default_factory=list)

    @property
    def start_ns(self) -> int:
        """When the request started."""
        return self._start_ns

    @property
    def last_ns(self) -> int:
        """When the last tokens were committed; now, before the first."""
        return self._last_ns or time.monotonic_ns()

    def prefilled(self, duration_ns: int) -> None:
        """The prompt is in the cache."""
        self._prefill_ns += duration_ns

    def waited(self, duration_ns: int) -> None:
        """The policy chose to wait."""
        self._wait_ns += duration_ns

    def passed(self, duration_ns: int, outcome: PassOutcome) -> None:
        """A pass is over."""
        now_ns = time.monotonic_ns()
        if self._last_ns is not None:
            self._chunk_gaps_ns.append(now_ns - self._last_ns)
        self._last_ns = now_ns
        self._first_ns = self._first_ns or now_ns
        self._pass_ns += duration_ns
        self._num_passes += 1
        self._num_tokens += outcome.num_tokens
        # As elsewhere in the field, candidates behind the first rejected one count as verified.
        self._num_verified += outcome.num_judged
        self._num_drafts += outcome.num_judged > 0
        self._num_accepted += outcome.num_accepted
        self._num_late_accepted += outcome.num_late_accepted
        self._num_alternatives += outcome.num_alternatives
        self._num_rescued += outcome.num_rescued
        self._acceptance[outcome.num_judged, outcome.num_accepted] += outcome.num_judged > 0
        self._accepted_by_position.extend([0] * (outcome.num_accepted - len(self._accepted_by_position)))
        for position in range(outcome.num_accepted):
            self._accepted_by_position[position] += 1

    def metrics(self) -> GenerationMetrics:
        """What has been counted so far."""
        last_ns = self.last_ns
        return GenerationMetrics(
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self._num_tokens,
            first_token_ns=(self._first_ns or last_ns) - self._start_ns,
            total_ns=last_ns - self._start_ns,
            prefill_ns=self._prefill_ns,
            pass_ns=self._pass_ns,
            wait_ns=self._wait_ns,
            num_passes=self._num_passes,
            num_drafts=self._num_drafts,
            num_verified=self._num_verified,
            num_accepted=self._num_accepted,
            num_late_accepted=self._num_late_accepted,
            num_alternatives=self._num_alternatives,
            num_rescued=self._num_rescued,
            accepted_by_position=tuple(self._accepted_by_position),
            acceptance={key: count for key, count in self._acceptance.items() if count},
            chunk_gaps_ns=tuple(self._chunk_gaps_ns),
            num_stale_candidates=self.num_stale_candidates,
            num_refused=self.num_refused,
            num_draft_restarts=self.num_draft_restarts,
            num_tokens_alone=self.num_tokens_alone,
            # what a lost draft did is not known to its end, and no other one speaks for it
            draft=None if self.num_draft_losses else self.draft,
        )
