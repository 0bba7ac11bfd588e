"""Asynchronous decoding that finds out by itself how long to wait, how much to verify, and whether to draft at all.

One candidate more is worth waiting for if the tokens it may bring are more than what the pair commits in the time until
it comes. It brings one with the chance that it and all before it are accepted. If it is the first that is not, the text
goes on where less is prepared than behind the target's own token, which the pass would have ended with instead. And the
draft is amid the step that brings it: what is done of that step would have been a start for the pass after this one.
That is the best `min_candidates` of a chain or a tree (docs/branching.md), found pass by pass, as it depends on how
sure the draft is of what is at hand. No wait is thrice as long as usual, and none follows one that was in vain before a
candidate has come: machines stall. Nor is a draft waited for that joins amid the answer before it brings something. A
candidate at hand is verified unless what it adds to the pass outweighs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from amusd.policies.base import Decision, TargetView, Verify, Wait

STEP_DONE = 0.5
"""Of the draft's step under way, on average, where the target has candidates."""


@dataclass(frozen=True, slots=True)
class AutoPolicy:
    """Verify once waiting for more costs more than it brings; `fan_out` 1 keeps the draft to one chain."""

    max_lookahead: int
    fan_out: int
    rows_per_step: int
    max_wait_passes: float
    breadth: int = 1
    tokens_per_message: int = 1

    def decide(self, view: TargetView) -> Decision:
        """Verify now what is worth it, or wait for one more candidate."""
        if not view.drafting_pays:
            drafting, plain = view.tokens_per_second, view.plain_tokens_per_second
            state = "the draft rests" if drafting < plain else "a rest is tried"
            reason = f"{state}: {drafting:.1f} tokens/s with the draft, {plain:.1f} without"
            return Verify(0, reason, tells_draft=False)
        row_loss = view.row_seconds * max(view.tokens_per_second, view.plain_tokens_per_second)
        num_candidates = sum(chance > row_loss for chance in view.chances)
        if view.can_grow and not view.draft_is_mute:
            loss = view.tokens_per_second * view.candidate_seconds + row_loss
            if view.num_candidates:
                loss += STEP_DONE * view.path_chance * view.lead_gain
            seconds_left = min(self.max_wait_passes * view.pass_seconds - view.waited_seconds, view.longest_wait)
            reason = f"one more candidate: {view.gain:.2f} tokens for {loss:.2f}"
            if view.gain > loss and seconds_left > 0:
                return Wait(seconds_left, reason)
            reason = reason if seconds_left > 0 else "waited for as long as a pass takes"
            return Verify(num_candidates, reason, min_chance=row_loss)
        return Verify(num_candidates, min_chance=row_loss)
