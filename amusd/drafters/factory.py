"""From the configuration to drafters that can be made, some for each of several sequences, over models loaded once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from amusd.config import DrafterConfig, EngineConfig
from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.base import Drafter, DrafterFactory, DrafterKind, one_by_one
from amusd.drafters.ngram import NgramCache, NgramDrafter
from amusd.drafters.synthetic import SyntheticDrafter, SyntheticTreeDrafter
from amusd.drafters.tree import ModelTreeDrafter
from amusd.errors import ConfigError
from amusd.models.cached_model import CachedModel
from amusd.models.language_model import KVCache
from amusd.models.loading import load_draft_model
from amusd.models.sharding import ALONE, Ranks
from amusd.protocol.draft_session import MAX_NODES


@dataclass(frozen=True, slots=True)
class LoadedDrafters:
    """What a draft worker offers."""

    factories: Mapping[DrafterKind, DrafterFactory]
    """The makers of drafters. A name is the configuration's `kind`; those with a model draft trees, too."""
    vocab_size: int
    """The models' vocabulary size; 0 without one."""
    tokenizer_hash: str
    """The fingerprint of the models' tokenizer; empty where every drafter works with any."""
    num_ids: int = 0
    """Token ids that every model takes in: `[0, num_ids)`; 0 where none has to."""

    def names(self, *, drafts_trees: bool) -> tuple[str, ...]:
        """Return the names of the drafters of trees, or of chains."""
        return tuple(kind.name for kind in self.factories if kind.drafts_trees == drafts_trees)


def load_drafters(engine: EngineConfig, device: str, ranks: Ranks = ALONE) -> LoadedDrafters:
    """Load what the engine's drafters need. Raises `ConfigError` when one cannot be had, or their tokenizers differ.

    `ranks`: those that share the model of the only drafter.
    """
    factories: dict[DrafterKind, DrafterFactory] = {}
    vocab_size, num_ids, tokenizer_hash = 0, 0, ""
    for config in engine.drafters:
        if config.kind == "ngram":
            factories[DrafterKind(config.kind)] = _ngram_factory(config)
            continue
        model, tokenizer = load_draft_model(config, engine, device, ranks=ranks)
        factories[DrafterKind(config.kind)] = _model_factory(config, model)
        factories[DrafterKind(config.kind, drafts_trees=True)] = _tree_factory(config, model)
        if tokenizer is None:
            continue
        if tokenizer_hash and tokenizer.fingerprint != tokenizer_hash:
            raise ConfigError(f"drafter={config.kind}: its tokenizer differs from that of the drafters before it")
        vocab_size, tokenizer_hash = model.vocab_size, tokenizer.fingerprint
        num_ids = min(num_ids or model.num_ids, model.num_ids)
    return LoadedDrafters(factories, vocab_size, tokenizer_hash, num_ids)


def _ngram_factory(config: DrafterConfig) -> DrafterFactory:
    return one_by_one(lambda: NgramDrafter(config.min_ngram, config.max_ngram))


def _model_factory(config: DrafterConfig, model: CachedModel) -> DrafterFactory:
    def make(cache: KVCache) -> Drafter:
        if config.kind == "synthetic":
            return SyntheticDrafter(AutoregressiveDrafter(model, cache=cache), config.accept, model.vocab_size)
        looks_up = config.kind == "embedded" and config.min_lookup > 0
        lookup = NgramDrafter(config.min_lookup, config.max_lookup) if looks_up else None
        return AutoregressiveDrafter(model, lookup, cache=cache)

    return lambda number: [make(cache) for cache in model.new_caches(number, model.max_length)]


def _tree_factory(config: DrafterConfig, model: CachedModel) -> DrafterFactory:
    def make(cache: KVCache) -> Drafter:
        if config.kind == "synthetic":
            drafter = ModelTreeDrafter(model, num_ids=model.vocab_size, cache=cache)
            return SyntheticTreeDrafter(drafter, config.accept, config.accept_next, model.vocab_size)
        looks_up = config.kind == "embedded" and config.min_lookup > 0
        ngrams = NgramCache(config.min_lookup, config.max_lookup) if looks_up else None
        return ModelTreeDrafter(model, ngrams, cache=cache)

    return lambda number: [make(cache) for cache in model.new_caches(number, model.max_length, spare=MAX_NODES)]
