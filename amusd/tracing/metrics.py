"""The figures of a generation, from raw counts. Counts add up over generations; ratios are taken of the sums.

Names follow the serving world where it has one: `acceptance_rate` is accepted / verified candidates (drafted tokens
that were never verified are not in it), `mean_acceptance_length` is tokens per verification, the target's own included,
`acceptance_by_position[i]` is the share of verifications with candidates whose i-th candidate was accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class DraftCounts:
    """The draft's share, from its final `Progress`. Times in nanoseconds."""

    num_steps: int = 0
    num_drafted: int = 0
    num_rollbacks: int = 0
    num_stale: int = 0
    busy_ns: int = 0
    wait_ns: int = 0
    """Waiting because there was nothing to draft: the run-ahead cap was reached."""
    open_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class GenerationMetrics:
    """Raw counts of one generation, or the sum over several. Times in nanoseconds."""

    num_prompts: int = 1
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    """Tokens of the answers, the end-of-sequence token included."""
    first_token_ns: int = 0
    """From the request to the first committed tokens."""
    total_ns: int = 0
    """From the request to the last committed token."""
    prefill_ns: int = 0
    pass_ns: int = 0
    """In target passes."""
    wait_ns: int = 0
    """Waiting because the policy chose to."""
    num_passes: int = 0
    num_drafts: int = 0
    """Passes that had candidates to judge."""
    num_verified: int = 0
    """Candidates judged."""
    num_accepted: int = 0
    num_late_accepted: int = 0
    """Of these, candidates that arrived during the pass and stood where the bonus token would have come."""
    accepted_by_position: tuple[int, ...] = ()
    num_stale_candidates: int = 0
    """Candidate messages from before a rollback."""
    num_refused: int = 0
    """Candidate messages that the protocol forbids."""
    draft: DraftCounts | None = None
    """None: no draft took part, or it was lost before it could report."""

    @property
    def decode_ns(self) -> int:
        """From the first committed tokens to the last."""
        return self.total_ns - self.first_token_ns

    def as_dict(self) -> dict[str, Any]:
        """The documented names, with ratios; None where a figure does not exist."""
        draft = self.draft
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_tokens": self.num_tokens,
            "tokens_per_second": _ratio(self.num_tokens * 1e9, self.total_ns),
            "ms_per_token": _ratio(self.total_ns / 1e6, self.num_tokens),
            "time_to_first_token_ms": _ratio(self.first_token_ns / 1e6, self.num_prompts),
            "num_passes": self.num_passes,
            "num_spec_steps": self.num_drafts,
            "num_draft_tokens": self.num_verified,
            "num_accepted_draft_tokens": self.num_accepted,
            "num_late_accepted": self.num_late_accepted,
            "acceptance_rate": _ratio(self.num_accepted, self.num_verified),
            "mean_acceptance_length": _ratio(self.num_tokens, self.num_passes),
            "acceptance_by_position": [count / self.num_drafts for count in self.accepted_by_position],
            "num_rollbacks": draft.num_rollbacks if draft else None,
            "num_drafted": draft.num_drafted if draft else None,
            "wasted_draft_fraction": _ratio(draft.num_drafted - self.num_accepted, draft.num_drafted)
            if draft
            else None,
            "target_idle_fraction": _ratio(self.total_ns - self.pass_ns - self.prefill_ns, self.total_ns),
            "target_wait_fraction": _ratio(self.wait_ns, self.total_ns),
            "draft_idle_fraction": _ratio(draft.open_ns - draft.busy_ns, draft.open_ns) if draft else None,
            "num_stale_candidates": self.num_stale_candidates,
            "num_refused": self.num_refused,
        }


def total(parts: Sequence[GenerationMetrics]) -> GenerationMetrics:
    """The sum over several generations. Draft counts add up over those that have them."""
    sums = {
        f.name: sum(getattr(part, f.name) for part in parts)
        for f in fields(GenerationMetrics)
        if f.name not in ("accepted_by_position", "draft")
    }
    width = max((len(part.accepted_by_position) for part in parts), default=0)
    by_position = tuple(
        sum(part.accepted_by_position[i] for part in parts if i < len(part.accepted_by_position)) for i in range(width)
    )
    drafts = [part.draft for part in parts if part.draft is not None]
    draft = DraftCounts(**{f.name: sum(getattr(d, f.name) for d in drafts) for f in fields(DraftCounts)})
    return GenerationMetrics(**sums, accepted_by_position=by_position, draft=draft if drafts else None)


def overlap_fraction(inner: Sequence[tuple[int, int]], outer: Sequence[tuple[int, int]]) -> float | None:
    """Share of the time in `inner` spans that lies inside `outer` spans; None without inner time.

    Spans are `(start_ns, end_ns)`, sorted and disjoint within each sequence (one worker does one thing at a time).
    """
    inside, j = 0, 0
    for start, end in inner:
        while j < len(outer) and outer[j][1] <= start:
            j += 1
        k = j
        while k < len(outer) and outer[k][0] < end:
            inside += min(end, outer[k][1]) - max(start, outer[k][0])
            k += 1
    return _ratio(inside, sum(end - start for start, end in inner))


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
