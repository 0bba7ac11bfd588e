"""From the configuration to drafters that can be made, one for each sequence, over models loaded once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from amusd.config import DrafterConfig, EngineConfig
from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.base import Drafter
from amusd.drafters.ngram import NgramCache, NgramDrafter
from amusd.drafters.synthetic import SyntheticDrafter, SyntheticTreeDrafter
from amusd.drafters.tree import ModelTreeDrafter
from amusd.errors import ConfigError
from amusd.models.cached_model import CachedModel
from amusd.models.loading import load_draft_model
from amusd.models.sharding import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class LoadedDrafters:
    """What a draft worker offers."""

    factories: Mapping[str, Callable[[], Drafter]]
    """Makes a drafter of chains, by name (the configuration's `kind`)."""
    vocab_size: int
    """Of the models; 0 without one."""
    tokenizer_hash: str
    """Of the models' tokenizer; empty where every drafter works with any."""
    tree_factories: Mapping[str, Callable[[], Drafter]] = field(default_factory=dict)
    """The same of trees, for those that can draft them."""
    num_ids: int = 0
    """Token ids that every model takes in: `[0, num_ids)`; 0 where none has to."""


def load_drafters(engine: EngineConfig, device: str, ranks: Ranks = ALONE) -> LoadedDrafters:
    """Load what the engine's drafters need. Raises `ConfigError` when one cannot be had, or their tokenizers differ.

    `ranks`: those that share the model of the only drafter.
    """
    factories: dict[str, Callable[[], Drafter]] = {}
    tree_factories: dict[str, Callable[[], Drafter]] = {}
    vocab_size, num_ids, tokenizer_hash = 0, 0, ""
    for config in engine.drafters:
        if config.kind == "ngram":
            factories[config.kind] = _ngram_factory(config)
            continue
        model, tokenizer = load_draft_model(config, engine, device, ranks=ranks)
        factories[config.kind] = _model_factory(config, model)
        tree_factories[config.kind] = _tree_factory(config, model)
        if tokenizer is None:
            continue
        if tokenizer_hash and tokenizer.fingerprint != tokenizer_hash:
            raise ConfigError(f"drafter={config.kind}: its tokenizer differs from that of the drafters before it")
        vocab_size, tokenizer_hash = model.vocab_size, tokenizer.fingerprint
        num_ids = min(num_ids or model.num_ids, model.num_ids)
    return LoadedDrafters(factories, vocab_size, tokenizer_hash, tree_factories, num_ids)


def _ngram_factory(config: DrafterConfig) -> Callable[[], Drafter]:
    return lambda: NgramDrafter(config.min_ngram, config.max_ngram)


def _model_factory(config: DrafterConfig, model: CachedModel) -> Callable[[], Drafter]:
    if config.kind == "synthetic":
        return lambda: SyntheticDrafter(AutoregressiveDrafter(model), config.accept, model.vocab_size)
    if config.kind == "embedded" and config.min_lookup > 0:
        return lambda: AutoregressiveDrafter(model, NgramDrafter(config.min_lookup, config.max_lookup))
    return lambda: AutoregressiveDrafter(model)


def _tree_factory(config: DrafterConfig, model: CachedModel) -> Callable[[], Drafter]:
    if config.kind == "synthetic":
        return lambda: SyntheticTreeDrafter(
            ModelTreeDrafter(model, num_ids=model.vocab_size), config.accept, config.accept_next, model.vocab_size
        )
    if config.kind == "embedded" and config.min_lookup > 0:
        return lambda: ModelTreeDrafter(model, NgramCache(config.min_lookup, config.max_lookup))
    return lambda: ModelTreeDrafter(model)
