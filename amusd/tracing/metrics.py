"""The figures of a generation, from raw counts. Counts add up over generations; ratios are taken of the sums.

`acceptance_rate` is accepted / judged candidates; `tokens_per_verification` is committed tokens / passes.
`mean_acceptance_length` leaves out passes without candidates (see below). `acceptance_by_position[i]` is the share of
verifications with candidates whose i-th candidate was accepted.

Latencies in milliseconds, of tokens as they leave the target:

    time_to_first_token_ms          from the admission of the request to the first committed tokens
    time_per_output_token_ms        (end of the answer - first token) / (tokens - 1)
    median_inter_token_latency_ms   between passes, each of which commits one token or more;
    p99_inter_token_latency_ms      None with fewer than two

`speculative_decoding` has the names and meanings that benchmark clients read from a server's
`metrics.speculative_decoding`; no value is None, which such clients refuse. A step is a pass with judged candidates:

    mean_acceptance_length                 1 + accepted / steps; 1 without steps
    draft_acceptance_rate                  accepted / judged candidates; 0 without any
    acceptance_histogram                   [j]: steps that accepted exactly j candidates, 0 <= j <= num_spec_tokens
    acceptance_histogram_by_draft_length   the same for each number of judged candidates
    num_spec_steps                         steps
    num_accepted_draft_tokens              candidates accepted
    num_draft_tokens                       candidates judged
    num_spec_tokens                        the most candidates that a step judged: no setting fixes it
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

from amusd.protocol.messages import Progress
from amusd.protocol.verification import PassOutcome


@dataclass
class TargetCounts:
    """A target's work since its start, over all sequences."""

    num_passes: int = 0
    """A pass over several sequences counts once."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens of prompts whose keys and values were reused."""
    num_tokens: int = 0
    """Tokens of answers, end-of-sequence included."""
    num_drafts: int = 0
    """Passes with candidates to judge, once for each sequence."""
    num_verified: int = 0
    """Candidates judged, those after the first rejected one included."""
    num_accepted: int = 0
    num_tokens_alone: int = 0
    """Tokens committed while the wanted draft was lost or silent."""

    def add(self, outcome: PassOutcome, *, is_alone: bool) -> None:
        """Count the outcome of a pass for one sequence."""
        self.num_tokens += outcome.num_tokens
        self.num_drafts += outcome.num_judged > 0
        self.num_verified += outcome.num_judged
        self.num_accepted += outcome.num_accepted
        self.num_tokens_alone += outcome.num_tokens if is_alone else 0


@dataclass(kw_only=True)
class GenerationMetrics(TargetCounts):
    """Raw counts of one generation, or the sum over several. Times in nanoseconds."""

    num_prompts: int = 1
    first_token_ns: int = 0
    total_ns: int = 0
    """From the admission to the last committed token; before the first one, the time of the prompt."""
    prefill_ns: int = 0
    pass_ns: int = 0
    wait_ns: int = 0
    """Waits chosen by the policy."""
    acceptance: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(candidates judged, accepted) -> passes."""
    num_late_accepted: int = 0
    """Accepted candidates that arrived during the pass, in place of the bonus token."""
    num_alternatives: int = 0
    num_accepted_alternatives: int = 0
    chunk_gaps_ns: list[int] = field(default_factory=list)
    """Times between successive commits."""
    num_stale_candidates: int = 0
    num_refused: int = 0
    num_draft_losses: int = 0
    num_draft_restarts: int = 0
    draft: Progress | None = None
    """None: no draft took part, or it was lost or too slow to report."""

    def on_prefill(self, duration_ns: int) -> None:
        """Count a part of the prompt."""
        self.prefill_ns += duration_ns
        self.first_token_ns = self.total_ns = self.prefill_ns

    def on_pass(self, elapsed_ns: int, duration_ns: int, outcome: PassOutcome, *, is_alone: bool = False) -> None:
        """Count a pass, whose tokens were committed `elapsed_ns` after the admission.

        `is_alone`: the wanted draft was lost or silent.
        """
        if self.num_passes:
            self.chunk_gaps_ns.append(elapsed_ns - self.total_ns)
        else:
            self.first_token_ns = elapsed_ns
        self.total_ns = elapsed_ns
        self.pass_ns += duration_ns
        self.num_passes += 1
        self.add(outcome, is_alone=is_alone)
        self.num_late_accepted += outcome.num_late_accepted
        self.num_alternatives += outcome.num_alternatives
        self.num_accepted_alternatives += outcome.num_accepted_alternatives
        if outcome.num_judged:
            self.acceptance[outcome.num_judged, outcome.num_accepted] += 1

    def on_progress(self, progress: Progress) -> None:
        """Take in the draft's final counts, unless a draft was lost."""
        if not self.num_draft_losses:
            self.draft = progress

    def on_draft_lost(self) -> None:
        """Count a lost draft."""
        self.num_draft_losses += 1

    @property
    def accepted_by_position(self) -> list[int]:
        """How many passes accepted the candidate at each position."""
        longest = max((accepted for _, accepted in self.acceptance), default=0)
        return [
            sum(number for (_, accepted), number in self.acceptance.items() if accepted > position)
            for position in range(longest)
        ]

    def as_dict(self) -> dict[str, Any]:
        """The documented names, with ratios; None where a figure does not exist."""
        draft, speculative = self.draft, self._speculative_decoding()
        gaps_ms = sorted(ns / 1e6 for ns in self.chunk_gaps_ns)
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_tokens": self.num_tokens,
            "tokens_per_second": _ratio(self.num_tokens * 1e9, self.total_ns),
            "ms_per_token": _ratio(self.total_ns / 1e6, self.num_tokens),
            "time_to_first_token_ms": _ratio(self.first_token_ns / 1e6, self.num_prompts),
            "time_per_output_token_ms": _ratio(
                (self.total_ns - self.first_token_ns) / 1e6, max(0, self.num_tokens - self.num_prompts)
            ),
            "median_inter_token_latency_ms": statistics.median(gaps_ms) if gaps_ms else None,
            "p99_inter_token_latency_ms": gaps_ms[math.ceil(0.99 * len(gaps_ms)) - 1] if gaps_ms else None,
            "num_passes": self.num_passes,
            "num_spec_steps": self.num_drafts,
            "num_draft_tokens": self.num_verified,
            "num_accepted_draft_tokens": self.num_accepted,
            "num_late_accepted": self.num_late_accepted,
            "num_alternatives": self.num_alternatives,
            "num_accepted_alternatives": self.num_accepted_alternatives,
            "acceptance_rate": _ratio(self.num_accepted, self.num_verified),
            "tokens_per_verification": _ratio(self.num_tokens, self.num_passes),
            "mean_acceptance_length": speculative["mean_acceptance_length"] if self.num_drafts else None,
            "acceptance_by_position": [count / self.num_drafts for count in self.accepted_by_position],
            "num_rollbacks": draft and draft.num_rollbacks,
            "num_drafted": draft and draft.num_drafted,
            "wasted_draft_fraction": draft and _ratio(draft.num_drafted - self.num_accepted, draft.num_drafted),
            "target_idle_fraction": _ratio(self.total_ns - self.pass_ns - self.prefill_ns, self.total_ns),
            "target_wait_fraction": _ratio(self.wait_ns, self.total_ns),
            "draft_idle_fraction": draft and _ratio(draft.open_ns - draft.busy_ns, draft.open_ns),
            "num_stale_candidates": self.num_stale_candidates,
            "num_refused": self.num_refused,
            "num_draft_restarts": self.num_draft_restarts,
            "num_tokens_alone": self.num_tokens_alone,
            "speculative_decoding": speculative,
        }

    def _speculative_decoding(self) -> dict[str, Any]:
        rows = {
            judged: [self.acceptance.get((judged, accepted), 0) for accepted in range(judged + 1)]
            for judged in sorted({judged for judged, _ in self.acceptance})
        }
        return {
            "mean_acceptance_length": 1 + (_ratio(self.num_accepted, self.num_drafts) or 0.0),
            "draft_acceptance_rate": _ratio(self.num_accepted, self.num_verified) or 0.0,
            "acceptance_histogram": [sum(column) for column in zip_longest(*rows.values(), fillvalue=0)] or [0],
            "acceptance_histogram_by_draft_length": {str(judged): row for judged, row in rows.items()},
            "num_spec_steps": self.num_drafts,
            "num_accepted_draft_tokens": self.num_accepted,
            "num_draft_tokens": self.num_verified,
            "num_spec_tokens": max(rows, default=0),
        }


def total(parts: Sequence[GenerationMetrics]) -> GenerationMetrics:
    """The sum over generations; without draft counts if a generation with judged candidates lacks them."""
    whole = GenerationMetrics(num_prompts=0)
    drafts = [part.draft for part in parts if part.draft is not None]
    for f in fields(GenerationMetrics):
        if isinstance(getattr(whole, f.name), int):
            setattr(whole, f.name, sum(getattr(part, f.name) for part in parts))
    for part in parts:
        whole.acceptance.update(part.acceptance)
        whole.chunk_gaps_ns.extend(part.chunk_gaps_ns)
    if drafts and all(part.draft is not None or not part.num_drafts for part in parts):
        counts = Progress.__struct_fields__[1:]
        sums = {name: sum(getattr(draft, name) for draft in drafts) for name in counts}
        whole.draft = Progress(drafts[0].sequence_id, **sums)
    return whole


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
