"""The drafter, schedule and policy that a request names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real

from amusd.config import DecodingConfig, SamplingParams
from amusd.config.capabilities import capabilities_of, check_runs_ahead, kinds_with
from amusd.config.plugins import call, load_function
from amusd.errors import ConfigError
from amusd.policies import schedules
from amusd.policies.base import Decision, Policy, TargetView, Verify, Wait
from amusd.protocol.messages import MAX_FAN_OUT
from amusd.settings import MAX_COUNT, check_kind, nearest, shown
from amusd.types import Mode

SYNTHETIC = "synthetic"
WHOLE_TREE = 1 << 20
"""More tokens than any tree has: a message is full or the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPolicy(Policy):
    """A user's policy. Its mistakes raise errors of one line."""

    key: str
    own: Policy

    @property
    def name(self) -> str:
        """See `Policy`."""
        return self.own.name

    def decide(self, view: TargetView) -> Decision:
        """See `Policy`. Raises `ConfigError`."""
        decision: Decision = call("policy", self.key, (Verify, Wait), self.own.decide, view)
        for name in {field.name for field in fields(decision)} - {"reason"}:
            if not isinstance(value := getattr(decision, name), Real):
                raise ConfigError(f"policy={self.key}: {name}={shown(value)}: expected a number")
        return decision


def make_policy(decoding: DecodingConfig, *, can_branch: bool = False) -> Policy:
    """Make the policy that `decoding` names. `can_branch`: draft and acceptance rule allow trees.

    Raises `ConfigError`, one line, for a user policy's errors.
    """
    length, lookahead = decoding.num_speculative_tokens, decoding.max_lookahead
    least, wait = decoding.min_candidates, decoding.max_wait_passes
    trees = {"fan_out": decoding.fan_out, "rows_per_step": decoding.rows_per_step, "breadth": decoding.verify_breadth}
    if decoding.mode == "autoregressive":
        return schedules.AutoregressivePolicy()
    if decoding.mode == "synchronous":
        chain = schedules.SynchronousPolicy(max_lookahead=length, tokens_per_message=length)
        return replace(chain, tokens_per_message=WHOLE_TREE, max_steps=length, **trees) if decoding.tree else chain
    if decoding.policy == "auto":
        return schedules.AutoPolicy(max_lookahead=lookahead, max_wait_passes=wait, **(trees if can_branch else {}))
    if decoding.policy == "windowed":
        return schedules.WindowedPolicy(max_lookahead=2 * length, tokens_per_message=length)
    if decoding.policy in ("chain", "branching"):
        policy = schedules.ContinuousPolicy(max_lookahead=lookahead, min_candidates=least, max_wait_passes=wait)
        return replace(policy, always_waits=True, **trees) if decoding.policy == "branching" else policy
    function = load_function("policy", decoding.policy)
    own: Policy = call("policy", decoding.policy, (Policy,), function, decoding, can_branch=can_branch)
    plan = {field.name: getattr(own, field.name) for field in fields(Policy)}
    for name, value in plan.items():
        minimum, maximum = int(name != "max_steps"), MAX_FAN_OUT if name in ("fan_out", "rows_per_step") else MAX_COUNT
        if not isinstance(value, int) or not minimum <= value <= maximum:
            raise ConfigError(f"policy={decoding.policy}: {name}={shown(value)}: allowed: {minimum} to {maximum}")
    return OwnPolicy(key=decoding.policy, own=own, **plan)


def policy_name(decoding: DecodingConfig) -> str | None:
    """Name of the policy in results; None outside asynchronous mode."""
    return decoding.policy if decoding.mode == "asynchronous" else None


def choose_schedule(
    drafters: Sequence[str], decoding: DecodingConfig | None, drafter: str | None
) -> tuple[str | None, DecodingConfig]:
    """The drafter and the schedule that a request names. Raises `ConfigError` for unknown ones."""
    check_kind("decoding", decoding, DecodingConfig)
    check_kind("drafter", drafter, str)
    if drafter is not None and drafter not in drafters:
        has = ", ".join(drafters) or "none"
        raise ConfigError(f"drafter={shown(drafter)}: this engine has {has}{nearest(drafter, drafters)}")
    name = drafter or next(iter(drafters), "")
    if decoding is None:
        mode: Mode = "asynchronous" if capabilities_of(name).runs_ahead else "synchronous"
        decoding = DecodingConfig(mode=mode if drafters else "autoregressive")
    if decoding.mode == "autoregressive":
        return None, decoding
    if not drafters:
        raise ConfigError(f"mode={decoding.mode}: this engine has no drafter; allowed: autoregressive")
    check_runs_ahead(name, decoding)
    return name, decoding


def choose_policy(
    params: SamplingParams, drafter: str | None, decoding: DecodingConfig, *, is_chain: bool = False
) -> Policy:
    """The policy of a request. Raises `ConfigError` for trees that drafter or acceptance rule forbid.

    `is_chain`: this drafter drafts no trees, so `auto` takes chains.
    """
    drafts_trees = capabilities_of(drafter).tree
    policy = make_policy(decoding, can_branch=drafts_trees and not is_chain and params.rule != "rejection")
    is_synchronous = decoding.mode == "synchronous"
    setting = f"tree={str(decoding.tree).lower()}" if is_synchronous else f"policy={decoding.policy}"
    if policy.fan_out > 1 and params.rule == "rejection":
        allowed = f"whose draws no draft can foresee; allowed: {'tree=false' if is_synchronous else 'chain'}"
        raise ConfigError(f"{setting}: not with sampling.acceptance=rejection, {allowed}")
    if policy.fan_out > 1 and not drafts_trees:
        raise ConfigError(f"{setting}: drafter={drafter} drafts no trees; allowed: {', '.join(kinds_with('tree'))}")
    return policy


def check_sampling(params: SamplingParams, drafter: str | None, reference: Sequence[int], vocab_size: int) -> None:
    """Raise `ConfigError` for a missing reference, or for a token in it or in `logit_bias` that the model lacks."""
    if drafter == SYNTHETIC and (params.rule == "rejection" or not reference):
        needed = "`reference`, plain decoding's answer, which sampling.acceptance=rejection does not fix"
        raise ConfigError(f"drafter=synthetic: has to be told {needed}")
    if not all(0 <= token_id < vocab_size for token_id in reference):
        raise ConfigError(f"reference: token ids must be in [0, {vocab_size})")
    highest = max((token_id for token_id, _ in params.logit_bias), default=0)
    if highest >= vocab_size:
        raise ConfigError(f"sampling.logit_bias: no token is {highest}; the model's are 0 to {vocab_size - 1}")
