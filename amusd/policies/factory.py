"""From the configuration of a request to its policy."""

from __future__ import annotations

from amusd.config import DecodingConfig
from amusd.policies.base import Policy
from amusd.policies.branching import BranchingPolicy
from amusd.policies.chain import ChainPolicy
from amusd.policies.lockstep import AutoregressivePolicy, SynchronousPolicy
from amusd.types import Mode


def make_policy(decoding: DecodingConfig) -> Policy:
    """The policy that `decoding` names; in asynchronous mode `auto` is the chain."""
    if decoding.mode is Mode.AUTOREGRESSIVE:
        return AutoregressivePolicy()
    if decoding.mode is Mode.SYNCHRONOUS:
        return SynchronousPolicy(decoding.num_speculative_tokens, decoding.draft_timeout_seconds)
    if policy_name(decoding) == "branching":
        return BranchingPolicy(
            max_lookahead=decoding.max_lookahead,
            fan_out=decoding.fan_out,
            rows_per_step=decoding.rows_per_step,
            min_candidates=decoding.min_candidates,
            max_wait_passes=decoding.max_wait_passes,
        )
    return ChainPolicy(
        max_lookahead=decoding.max_lookahead,
        tokens_per_message=decoding.tokens_per_message,
        min_candidates=decoding.min_candidates,
        max_wait_passes=decoding.max_wait_passes,
    )


def policy_name(decoding: DecodingConfig) -> str | None:
    """What results call the policy: None outside asynchronous mode."""
    if decoding.mode is not Mode.ASYNCHRONOUS:
        return None
    return "chain" if decoding.policy == "auto" else decoding.policy
