"""Asynchronous decoding that finds by itself how long to wait, how much to verify, and whether to draft at all.

One more candidate is worth waiting for if the tokens that it may bring are more than what the pair commits in the time
until it comes. That is decided pass by pass, as it depends on how sure the draft is of what is at hand.

gain    The candidate brings a token if it and all before it are accepted.
loss    The tokens that the sequence commits in the time of the wait, and all of the pass in that of the candidate's
        row. And the draft is amid the step that brings the candidate: without the wait, the part done would
        be a start for the next pass.

One step of the draft is for all sequences, and a wait delays them all, so a pass over several waits as long as their
gains are more than their losses (`TargetWorker`).

A wait is never longer than three times the usual one, and after a wait in vain none follows before a candidate has
come: machines stall. A draft that joins amid an answer is not waited for before it has brought something. A candidate
at hand is verified unless its row costs more than it may bring (docs/branching.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from amusd.policies.base import Decision, Policy, TargetView, Verify, Wait

STEP_DONE = 0.5
"""The part of the draft's step under way that is done on average if the target has candidates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoPolicy(Policy):
    """Verify once waiting for more costs more than it brings; `fan_out` 1 keeps the draft to one chain."""

    max_wait_passes: float

    def decide(self, view: TargetView) -> Decision:
        """Verify now what is worth its row, or wait for one more candidate."""
        delay = view.tokens_per_second * view.candidate_seconds
        if not view.drafting_pays:
            drafting, plain = view.tokens_per_second, view.plain_tokens_per_second
            state = "the draft rests" if drafting < plain else "a rest is tried"
            reason = f"{state}: {drafting:.1f} tokens/s with the draft, {plain:.1f} without"
            return Verify(0, reason, -delay, tells_draft=False)
        row_loss = view.row_seconds * max(view.tokens_per_second, view.plain_tokens_per_second)
        num_candidates = sum(chance > row_loss for chance in view.chances)
        if not view.can_grow or view.draft_is_mute:
            return Verify(num_candidates, worth=-delay, min_chance=row_loss)
        loss = delay + row_loss
        if view.num_candidates:
            loss += STEP_DONE * view.path_chance * view.lead_gain
        seconds_left = min(self.max_wait_passes * view.pass_seconds - view.waited_seconds, view.longest_wait)
        if seconds_left <= 0:
            return Verify(num_candidates, "waited for as long as a pass takes", -delay, min_chance=row_loss)
        reason = f"one more candidate: {view.gain:.2f} tokens for {loss:.2f}"
        # what is not worth its own cost need not be verified when it comes
        worth = max(view.gain - loss, -delay)
        if worth > 0:
            return Wait(seconds_left, reason, worth)
        return Verify(num_candidates, reason, worth, min_chance=row_loss)
