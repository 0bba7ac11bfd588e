"""Outcomes of passes."""

from __future__ import annotations

from amusd.protocol.verification import PassOutcome


def outcome(num_candidates: int, num_accepted: int = 0, num_judged: int | None = None) -> PassOutcome:
    return PassOutcome(
        num_candidates=num_candidates,
        num_judged=num_candidates if num_judged is None else num_judged,
        num_accepted=num_accepted,
        num_alternatives=0,
        num_accepted_alternatives=0,
        num_tokens=num_accepted + 1,
    )
