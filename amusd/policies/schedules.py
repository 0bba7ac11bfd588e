"""The schedules: the baselines, `chain` and `branching` with fixed settings, and `auto`, which tunes itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

from amusd.policies.base import Decision, Policy, TargetView, Verify, Wait
from amusd.policies.estimates import STEP_DONE

BLOCK_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoregressivePolicy(Policy):
    """Plain decoding: one token a pass, no draft."""

    def decide(self, view: TargetView) -> Decision:  # noqa: ARG002 - the same answer whatever the view
        """Verify nothing, at once."""
        return Verify(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousPolicy(Policy):
    """The draft proposes a block and stops; the target verifies the block.

    A block is `max_lookahead` tokens in one message, or a tree of `max_steps` steps.

    References:
        https://arxiv.org/abs/2211.17192, https://arxiv.org/abs/2302.01318; trees: https://arxiv.org/abs/2305.09781
    """

    timeout_seconds: float = BLOCK_TIMEOUT_SECONDS

    def decide(self, view: TargetView) -> Decision:
        """Wait until the draft's block is complete, then verify it."""
        seconds_left = self.timeout_seconds - view.waited_seconds
        is_whole = not (view.may_get_more if self.max_steps else view.lacks(self.max_lookahead))
        if not is_whole and seconds_left > 0:
            return Wait(seconds_left, worth=math.inf)  # blocks are verified in lock step
        return Verify(view.num_candidates)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedPolicy(Policy):
    """While one window of `tokens_per_message` is verified, the draft fills the next.

    After a restart of the draft the target makes a pass without candidates (pre-verification: its token is compared
    with the draft's first one). Otherwise it waits for a window (post-verification).

    References: PEARL, https://arxiv.org/abs/2408.11850.
    """

    timeout_seconds: float = BLOCK_TIMEOUT_SECONDS

    def decide(self, view: TargetView) -> Decision:
        """Wait for a window unless the draft starts anew."""
        seconds_left = self.timeout_seconds - view.waited_seconds
        lacks_window = view.num_candidates == 0 and view.may_get_more
        if lacks_window and not view.draft_restarting and seconds_left > 0:
            return Wait(seconds_left, worth=math.inf)
        return Verify(min(view.num_candidates, self.tokens_per_message))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousPolicy(Policy):
    """The draft runs ahead without a stop, and the target verifies what has arrived of the chain or tree.

    After a restart of the draft, or always with `always_waits`, the target waits for `min_candidates`, for
    `max_wait_passes` passes at most.

    References: AMUSD, https://arxiv.org/abs/2410.17375 (the chain); PipeSpec, https://arxiv.org/abs/2505.01572 (the
    wait); SSD / Saguaro, https://arxiv.org/abs/2603.03251 (continuations for the likely verdicts); EAGLE-2,
    https://arxiv.org/abs/2406.16858 (trees grown by confidence).
    """

    min_candidates: int
    max_wait_passes: float
    always_waits: bool = False

    @property
    def name(self) -> str:
        """The value of the setting `policy`."""
        return "branching" if self.always_waits else "chain"

    def decide(self, view: TargetView) -> Decision:
        """Verify now, or wait for the rest of `min_candidates`."""
        seconds_left = self.max_wait_passes * view.pass_seconds - view.waited_seconds
        if (view.draft_restarting or self.always_waits) and view.lacks(self.min_candidates) and seconds_left > 0:
            return Wait(seconds_left)
        return Verify(view.num_candidates)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoPolicy(Policy):
    """Decides by measured times how long to wait, how much to verify, and whether to draft (docs/branching.md).

    The target waits for one more candidate if the gain exceeds the loss, both in tokens; for several sequences, in sum.

        gain    the chance that the candidate and all before it are accepted
        loss    the tokens that could be committed in the time of the wait and of the candidate's row; and, if this pass
                began now, the next pass's gain from the step that the draft has begun

    A wait is at most three times as long as usual. After one in vain, none follows until a candidate has come.
    """

    max_wait_passes: float

    def decide(self, view: TargetView) -> Decision:
        """Verify now what is worth its row, or wait for one more candidate."""
        delay = view.tokens_per_second * view.candidate_seconds
        if not view.drafting_pays:
            drafting, plain = view.tokens_per_second, view.plain_tokens_per_second
            state = "drafting is paused" if drafting < plain else "a pause is tried"
            reason = f"{state}: {drafting:.1f} tokens/s with the draft, {plain:.1f} without"
            return Verify(0, reason, -delay, sends_verdict=False)
        row_loss = view.row_seconds * max(view.tokens_per_second, view.plain_tokens_per_second)
        num_candidates = sum(chance > row_loss for chance in view.chances)
        if not view.can_grow or view.waited_in_vain:
            return Verify(num_candidates, worth=-delay, min_chance=row_loss)
        loss = delay + row_loss
        if view.num_candidates:
            loss += STEP_DONE * view.path_chance * view.lead_gain
        seconds_left = min(self.max_wait_passes * view.pass_seconds - view.waited_seconds, view.longest_wait)
        if seconds_left <= 0:
            return Verify(num_candidates, "no time is left to wait", -delay, min_chance=row_loss)
        reason = f"one more candidate: {view.gain:.2f} tokens for {loss:.2f}"
        # a candidate that is not worth its cost need not be verified when it comes
        worth = max(view.gain - loss, -delay)
        if worth > 0:
            return Wait(seconds_left, reason, worth)
        return Verify(num_candidates, reason, worth, min_chance=row_loss)
