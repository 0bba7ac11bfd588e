"""The arguments of one request: its prompt, drafter, schedule and policy."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from amusd.config import CAPABILITIES, Capabilities, DecodingConfig, SamplingParams, check_runs_ahead, runs_ahead
from amusd.config.capabilities import kinds_with
from amusd.errors import ConfigError
from amusd.policies.base import Policy
from amusd.policies.factory import make_policy
from amusd.settings import nearest, shown
from amusd.types import Mode

SYNTHETIC = "synthetic"


def check_kind(name: str, value: Any, kind: type) -> None:
    """Raise `ConfigError` unless the argument `name` is of this kind, or None."""
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name}={shown(value)}: expected {kind.__name__}")


def check_turns(turns: Iterable[Any]) -> None:
    """Raise `ConfigError` unless each turn of a conversation has a role and a content."""
    for place, turn in enumerate(turns):
        if not isinstance(turn, Mapping) or any(type(turn.get(name)) is not str for name in ("role", "content")):
            raise ConfigError(f"prompt[{place}]={shown(turn)}: expected a mapping with the texts 'role' and 'content'")


def token_ids_of(name: str, values: Any) -> tuple[int, ...]:
    """The token ids of the argument `name`. Raises `ConfigError` for anything else."""
    try:
        return tuple(map(operator.index, [values] if isinstance(values, bytes) else values))
    except TypeError:
        expected = "a text, turns of a conversation, or token ids" if name == "prompt" else "token ids"
        raise ConfigError(f"{name}={shown(values)}: expected {expected}") from None


def choose_schedule(
    drafters: Sequence[str], decoding: DecodingConfig | None, drafter: str | None
) -> tuple[str | None, DecodingConfig]:
    """The drafter and the schedule that a request names. Raises `ConfigError` for unknown ones."""
    check_kind("decoding", decoding, DecodingConfig)
    name = next(iter(drafters), "") if drafter is None else drafter
    if decoding is None:
        mode: Mode = "asynchronous" if runs_ahead(name) else "synchronous"
        decoding = DecodingConfig(mode=mode if drafters else "autoregressive")
    if decoding.mode == "autoregressive":
        return None, decoding
    if not drafters:
        raise ConfigError(f"mode={decoding.mode}: this engine has no drafter; allowed: autoregressive")
    if name not in drafters:
        raise ConfigError(f"drafter={name}: this engine has {', '.join(drafters)}{nearest(name, drafters)}")
    check_runs_ahead(name, decoding)
    return name, decoding


def choose_policy(params: SamplingParams, drafter: str | None, decoding: DecodingConfig) -> Policy:
    """The policy of a request. Raises `ConfigError` for trees that drafter or acceptance rule forbid."""
    drafts_trees = CAPABILITIES.get(drafter or "", Capabilities()).tree
    policy = make_policy(decoding, can_branch=drafts_trees and params.rule != "rejection")
    is_synchronous = decoding.mode == "synchronous"
    asked = f"tree={str(decoding.tree).lower()}" if is_synchronous else f"policy={decoding.policy}"
    if policy.fan_out > 1 and params.rule == "rejection":
        allowed = f"whose draws no draft can foresee; allowed: {'tree=false' if is_synchronous else 'chain'}"
        raise ConfigError(f"{asked}: not with sampling.acceptance=rejection, {allowed}")
    if policy.fan_out > 1 and not drafts_trees:
        raise ConfigError(f"{asked}: drafter={drafter} drafts no trees; allowed: {', '.join(kinds_with('tree'))}")
    return policy


def check_sampling(params: SamplingParams, drafter: str | None, reference: Sequence[int], vocab_size: int) -> None:
    """Raise `ConfigError` for a missing reference, or a biased token that the model lacks."""
    if drafter == SYNTHETIC and (params.rule == "rejection" or not reference):
        needed = "the answer of plain decoding (`reference`), which sampling.acceptance=rejection leaves to chance"
        raise ConfigError(f"drafter=synthetic: has to be told {needed}")
    highest = max((token_id for token_id, _ in params.logit_bias), default=0)
    if highest >= vocab_size:
        raise ConfigError(f"sampling.logit_bias: no token is {highest}; the model's are 0 to {vocab_size - 1}")
