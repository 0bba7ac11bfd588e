"""Loads the models of the configured drafters once, and makes drafters over them, one for each of several sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from amusd.config import DrafterConfig, EngineConfig
from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.base import ChainDrafter, Drafter, DrafterFactory, DrafterKind, one_by_one
from amusd.drafters.block import BlockDrafter
from amusd.drafters.cascade import CascadeDrafter
from amusd.drafters.custom import factories_of, load_own
from amusd.drafters.eagle import EagleDrafter
from amusd.drafters.ngram import EarlierAnswers, NgramCache, NgramDrafter, NgramTreeDrafter
from amusd.drafters.synthetic import SyntheticDrafter, SyntheticTreeDrafter
from amusd.drafters.tree import ModelTreeDrafter
from amusd.errors import ConfigError
from amusd.models.block_models import BlockModel
from amusd.models.cached_model import CachedModel
from amusd.models.language_model import KVCache
from amusd.models.loading import load_block_draft, load_draft_model
from amusd.models.sharding import ALONE, Ranks
from amusd.models.tokenizer import Tokenizer
from amusd.models.vocabulary import describe_share
from amusd.protocol.draft_session import MAX_NODES


@dataclass(frozen=True, slots=True)
class LoadedDrafters:
    """The drafters that a draft worker offers."""

    factories: Mapping[DrafterKind, DrafterFactory]
    """The makers of drafters. A name is the configuration's `kind`; those with a model draft trees, too.
    Drafters of one name share their caches: the i-th of chains and the i-th of trees take turns."""
    vocab_size: int
    """The models' vocabulary size; 0 without one."""
    tokenizer_hash: str
    """The fingerprint of the models' tokenizer; empty where every drafter works with any."""
    num_ids: int = 0
    """Token ids that every model takes in: `[0, num_ids)`; 0 where none has to."""
    notes: Sequence[str] = ()
    """Lines that people should see, about drafters whose tokenizer is not the target's."""

    def names(self, *, drafts_trees: bool) -> tuple[str, ...]:
        """Return the names of the drafters of trees, or of chains."""
        return tuple(kind.name for kind in self.factories if kind.drafts_trees == drafts_trees)


StartInner = Callable[[DrafterConfig, CachedModel, Tokenizer], DrafterFactory]
"""Starts the process of a cascade's inner drafters; returns what makes them. `CachedModel`: the one in the middle."""


def load_drafters(
    engine: EngineConfig, device: str, ranks: Ranks = ALONE, start_inner: StartInner | None = None
) -> LoadedDrafters:
    """Load what the engine's drafters need. Raises `ConfigError` when one cannot be had, or their tokenizers differ.

    `ranks`: those that share the model of the only drafter. `start_inner`: for a cascade over devices; without
    it all is loaded here.
    """
    factories: dict[DrafterKind, DrafterFactory] = {}
    vocab_size, num_ids, tokenizer_hash = 0, 0, ""
    notes = []
    for config in engine.drafters:
        if config.kind == "ngram":
            factories |= _ngram_factories(config)
            continue
        if config.kind == "custom":
            own = load_own(config, engine, device)
            factories |= factories_of(config, own)
            num_ids = min(num_ids or own.num_ids, own.num_ids or num_ids)
            continue
        model: CachedModel | BlockModel
        tokenizer: Tokenizer | None
        if config.kind in ("medusa", "dflash"):
            model, tokenizer = block_model, _ = load_block_draft(config, engine, device, ranks)
            make = one_by_one(functools.partial(BlockDrafter, block_model))
            factories |= {DrafterKind(config.kind, drafts_trees=is_tree): make for is_tree in (False, True)}
        else:
            model, tokenizer = cached_model, _ = load_draft_model(config, engine, device, ranks=ranks)
            if config.kind != "cascade":
                factories |= _model_factories(config, cached_model)
            elif config.inner_device is not None and start_inner is not None and tokenizer is not None:
                inner = start_inner(config, cached_model, tokenizer)
                factories[DrafterKind(config.kind)] = _cascade_factory(config, cached_model, inner)
            else:
                inner, num_inner_ids = _load_inner(config, cached_model, tokenizer, engine, device)
                factories[DrafterKind(config.kind)] = _cascade_factory(config, cached_model, inner, num_inner_ids)
        if tokenizer is None:
            continue
        if tokenizer_hash and tokenizer.fingerprint != tokenizer_hash:
            raise ConfigError(f"drafter={config.kind}: its tokenizer differs from that of the drafters before it")
        vocab_size, tokenizer_hash = model.vocab_size, tokenizer.fingerprint
        num_ids = min(num_ids or model.num_ids, model.num_ids)
        if config.kind in ("cascade", "hf") and model.output_ids is not None:
            notes.append(describe_share(model.output_ids, model.num_ids, tokenizer.encode))
    return LoadedDrafters(factories, vocab_size, tokenizer_hash, num_ids, notes)


def _ngram_factories(config: DrafterConfig) -> dict[DrafterKind, DrafterFactory]:
    """The makers of chains and of trees, which remember the same earlier answers."""
    earlier = EarlierAnswers(config.remember) if config.remember else None
    chain, tree = (
        functools.partial(drafter, config.min_ngram, config.max_ngram, earlier)
        for drafter in (NgramDrafter, NgramTreeDrafter)
    )
    return {DrafterKind(config.kind): one_by_one(chain), DrafterKind(config.kind, drafts_trees=True): one_by_one(tree)}


def _lookups(config: DrafterConfig) -> DrafterFactory:
    return one_by_one(functools.partial(NgramDrafter, config.min_ngram, config.max_ngram))


def _load_inner(
    config: DrafterConfig, middle: CachedModel, tokenizer: Tokenizer | None, engine: EngineConfig, device: str
) -> tuple[DrafterFactory, int]:
    """The maker of a cascade's inner drafters, and how many token ids they take in; 0: all.

    Raises `ConfigError` where it cannot draft for `middle`, which has this tokenizer.
    """
    inner = config.stages[1]
    if inner.kind == "ngram":
        return _lookups(inner), 0
    model, own = load_draft_model(inner, engine, device)
    if own is None or tokenizer is None or own.fingerprint != tokenizer.fingerprint:
        raise ConfigError(f"drafter.inner={config.inner}: its tokenizer differs from that of {config.model}")
    if model.num_ids > middle.num_ids:
        raise ConfigError(
            f"drafter.inner={config.inner}: has {model.num_ids} token ids, more than {config.model} ({middle.num_ids})"
        )
    return _model_factories(inner, model)[DrafterKind(inner.kind)], model.num_ids


def _cascade_factory(
    config: DrafterConfig, middle: CachedModel, make_inner: DrafterFactory, num_inner_ids: int = 0
) -> DrafterFactory:
    """The maker of chains by `middle` and by inner drafters, which are chains, too."""

    def make(number: int) -> list[Drafter]:
        made: list[Drafter] = []
        for cache, inner in zip(middle.new_caches(number, middle.max_length), make_inner(number), strict=True):
            assert isinstance(inner, ChainDrafter)
            made.append(
                CascadeDrafter(middle, inner, config.num_inner_tokens, cache=cache, num_inner_ids=num_inner_ids)
            )
        return made

    return make


def _model_factories(config: DrafterConfig, model: CachedModel) -> dict[DrafterKind, DrafterFactory]:
    """The makers of chains and of trees over one set of caches: the i-th drafters of both have the same one."""
    looks_up = config.kind in ("embedded", "eagle") and config.min_lookup > 0
    caches = functools.cache(lambda number: model.new_caches(number, model.max_length, spare=MAX_NODES))

    def chain(cache: KVCache) -> Drafter:
        if config.kind == "synthetic":
            return SyntheticDrafter(AutoregressiveDrafter(model, cache=cache), config.accept, model.vocab_size)
        lookup = NgramCache(config.min_lookup, config.max_lookup) if looks_up else None
        return AutoregressiveDrafter(model, lookup, cache=cache)

    def tree(cache: KVCache) -> Drafter:
        if config.kind == "synthetic":
            drafter = ModelTreeDrafter(model, num_ids=model.vocab_size, cache=cache)
            return SyntheticTreeDrafter(drafter, config.accept, config.accept_next, model.vocab_size)
        ngrams = NgramCache(config.min_lookup, config.max_lookup) if looks_up else None
        if config.kind == "eagle":
            return EagleDrafter(model, ngrams, cache=cache)
        return ModelTreeDrafter(model, ngrams, cache=cache)

    make_chain = tree if config.kind == "eagle" else chain
    return {
        DrafterKind(config.kind): lambda number: [make_chain(cache) for cache in caches(number)],
        DrafterKind(config.kind, drafts_trees=True): lambda number: [tree(cache) for cache in caches(number)],
    }
