"""What each kind of drafter can do: the source of refusals and of the table in `docs/drafters.md`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from amusd.config.decoding import DecodingConfig
from amusd.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a kind of drafter can do; all draft chains. Defaults: a small model with the target's tokenizer."""

    tree: bool = True
    """Drafts trees: synchronous mode with `tree`, and the policies `branching` and `auto`."""
    runs_ahead: bool = True
    """Continues after its own unjudged guesses, as asynchronous mode needs."""
    needs_features: bool = False
    """Reads the target's hidden states of committed tokens."""
    has_model: bool = True
    """Is a causal language model on the draft's device."""
    checkpoint: bool = False
    """Is loaded from a checkpoint, `drafter.model`."""
    any_target: bool = False
    """Fits any target, also random weights (`hardware.synthetic`)."""


CAPABILITIES: Mapping[str, Capabilities] = {
    "embedded": Capabilities(),
    "hf": Capabilities(checkpoint=True),
    "eagle": Capabilities(needs_features=True, checkpoint=True),
    "medusa": Capabilities(runs_ahead=False, needs_features=True, has_model=False, checkpoint=True),
    "dflash": Capabilities(runs_ahead=False, needs_features=True, has_model=False, checkpoint=True),
    "cascade": Capabilities(tree=False, checkpoint=True),
    "ngram": Capabilities(has_model=False, any_target=True),
    "self": Capabilities(),
    "synthetic": Capabilities(any_target=True),
    "custom": Capabilities(has_model=False, any_target=True),
}
"""Capabilities by `DrafterConfig.kind`."""


def kinds_with(ability: str) -> tuple[str, ...]:
    """The kinds with this ability, a field of `Capabilities`."""
    return tuple(kind for kind, can in CAPABILITIES.items() if getattr(can, ability))


def capabilities_of(kind: str | None) -> Capabilities:
    """The abilities of a drafter of this kind, or the defaults."""
    return CAPABILITIES.get(kind or "", Capabilities())


def check_runs_ahead(kind: str | None, decoding: DecodingConfig) -> None:
    """Raise `ConfigError` for a drafter that cannot run ahead."""
    if decoding.mode == "asynchronous" and not capabilities_of(kind).runs_ahead:
        needed = "whose hidden states of the committed text it needs: use mode=synchronous"
        raise ConfigError(f"drafter={kind}: cannot run ahead of the target, {needed}")
