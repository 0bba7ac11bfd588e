"""The policy that the configuration of a request names."""

from __future__ import annotations

from typing import get_args

from amusd.config import AsynchronousPolicy, DecodingConfig
from amusd.config.plugins import POLICIES, failure, load_function
from amusd.errors import ConfigError
from amusd.policies.base import Policy
from amusd.policies.schedules import (
    AutoPolicy,
    AutoregressivePolicy,
    BranchingPolicy,
    ChainPolicy,
    SynchronousPolicy,
    WindowedPolicy,
)
from amusd.settings import shown
from amusd.types import Mode

BLOCK_TIMEOUT_SECONDS = 10.0
"""Longest wait of a synchronous target for a block, or of a windowed one for a window."""
WHOLE_TREE = 1 << 20
"""More tokens than any tree has: it travels as one message."""


def make_policy(decoding: DecodingConfig, *, can_branch: bool = False) -> Policy:
    """Make the policy that `decoding` names. `can_branch`: draft and acceptance rule allow trees."""
    if decoding.mode is Mode.AUTOREGRESSIVE:
        return AutoregressivePolicy()
    if decoding.mode is Mode.SYNCHRONOUS:
        length = decoding.num_speculative_tokens
        if decoding.tree:
            return SynchronousPolicy(
                max_lookahead=length,
                tokens_per_message=WHOLE_TREE,
                fan_out=decoding.fan_out,
                rows_per_step=decoding.rows_per_step,
                max_steps=length,
                breadth=decoding.verify_breadth,
                timeout_seconds=BLOCK_TIMEOUT_SECONDS,
            )
        return SynchronousPolicy(
            max_lookahead=length,
            tokens_per_message=length,
            timeout_seconds=BLOCK_TIMEOUT_SECONDS,
        )
    if decoding.policy not in get_args(AsynchronousPolicy):
        return _own_policy(decoding, can_branch=can_branch)
    if decoding.policy == "auto":
        return AutoPolicy(
            max_lookahead=decoding.max_lookahead,
            fan_out=decoding.fan_out if can_branch else 1,
            rows_per_step=decoding.rows_per_step,
            max_wait_passes=decoding.max_wait_passes,
            breadth=decoding.verify_breadth if can_branch else 1,
        )
    if decoding.policy == "branching":
        return BranchingPolicy(
            max_lookahead=decoding.max_lookahead,
            fan_out=decoding.fan_out,
            rows_per_step=decoding.rows_per_step,
            min_candidates=decoding.min_candidates,
            max_wait_passes=decoding.max_wait_passes,
            breadth=decoding.verify_breadth,
        )
    if decoding.policy == "windowed":
        return WindowedPolicy(
            max_lookahead=2 * decoding.num_speculative_tokens,
            tokens_per_message=decoding.num_speculative_tokens,
            timeout_seconds=BLOCK_TIMEOUT_SECONDS,
        )
    return ChainPolicy(
        max_lookahead=decoding.max_lookahead,
        min_candidates=decoding.min_candidates,
        max_wait_passes=decoding.max_wait_passes,
    )


def _own_policy(decoding: DecodingConfig, *, can_branch: bool) -> Policy:
    """The user's own. Raises `ConfigError`, one line, for all that goes wrong in making it."""
    named = decoding.policy
    make = load_function("policy", named, POLICIES)
    try:
        made = make(decoding, can_branch=can_branch)
    except ConfigError:
        raise
    except Exception as error:
        raise failure("policy", named, error) from error
    if not isinstance(made, Policy):
        raise ConfigError(f"policy={shown(named)}: returns {shown(repr(made))}; expected amusd.policies.base.Policy")
    return made


def policy_name(decoding: DecodingConfig) -> str | None:
    """Return the name of the policy in results; None outside asynchronous mode."""
    return decoding.policy if decoding.mode is Mode.ASYNCHRONOUS else None
