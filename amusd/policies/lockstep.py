"""The two baselines as schedules of the same machinery: the target alone, and draft and target taking turns."""

from __future__ import annotations

from dataclasses import dataclass

from amusd.policies.base import Decision, TargetView, Verify, Wait


@dataclass(frozen=True, slots=True)
class AutoregressivePolicy:
    """Plain decoding: one token a pass, no draft. The draft-facing limits are never sent to anyone."""

    max_lookahead: int = 1
    tokens_per_message: int = 1
    fan_out: int = 1
    rows_per_step: int = 1
    breadth: int = 1

    def decide(self, view: TargetView) -> Decision:  # noqa: ARG002 - the same answer whatever the view
        """Verify nothing, at once."""
        return Verify(0)


@dataclass(frozen=True, slots=True)
class SynchronousPolicy:
    """Synchronous speculative decoding: the draft proposes a block and stops, the target verifies all of it.

    References:
        https://arxiv.org/abs/2211.17192, https://arxiv.org/abs/2302.01318
    """

    num_speculative_tokens: int
    timeout_seconds: float
    """A block that takes longer is not waited for: the target goes on alone until the draft answers again."""
    fan_out: int = 1
    rows_per_step: int = 1
    breadth: int = 1

    @property
    def max_lookahead(self) -> int:
        """One block."""
        return self.num_speculative_tokens

    @property
    def tokens_per_message(self) -> int:
        """The block travels as one message."""
        return self.num_speculative_tokens

    def decide(self, view: TargetView) -> Decision:
        """Wait until the draft has nothing more to offer for this prefix, then verify its block."""
        if view.may_get_more and view.num_candidates < min(self.num_speculative_tokens, view.max_candidates):
            seconds_left = self.timeout_seconds - view.waited_seconds
            if seconds_left > 0:
                return Wait(seconds_left)
        return Verify(view.num_candidates)
