"""Loads the models of the configured drafters once, and makes drafters over them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from amusd.config import DrafterConfig, EngineConfig
from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.base import ChainDrafter, Drafter, DrafterFactory, Makers, one_by_one
from amusd.drafters.block import BlockDrafter
from amusd.drafters.cascade import CascadeDrafter
from amusd.drafters.custom import OwnDrafters, load_own
from amusd.drafters.eagle import EagleDrafter
from amusd.drafters.ngram import EarlierAnswers, NgramCache, NgramDrafter
from amusd.drafters.synthetic import ACCEPT_NEXT, SyntheticDrafter
from amusd.drafters.tree import ModelTreeDrafter
from amusd.errors import ConfigError
from amusd.models.block_models import BlockModel
from amusd.models.cached_model import CachedModel
from amusd.models.kv_cache import KVCache
from amusd.models.loading import load_block_draft, load_draft_model
from amusd.models.tokenizer import Tokenizer
from amusd.models.vocabulary import describe_share
from amusd.protocol.draft_session import MAX_NODES

MIN_LOOKUP = 4


@dataclass(frozen=True, slots=True)
class LoadedDrafters:
    """The drafters that a draft worker offers."""

    factories: Mapping[str, Makers]
    vocab_size: int
    """The models' vocabulary; 0 without a model."""
    tokenizer_hash: str
    num_ids: int = 0
    """Every model takes in `[0, num_ids)`; 0: any."""
    notes: Sequence[str] = ()
    models: Sequence[CachedModel] = ()

    def names(self, *, drafts_trees: bool) -> tuple[str, ...]:
        """Return the names of the drafters of trees, or of chains."""
        return tuple(name for name, makers in self.factories.items() if makers[drafts_trees] is not None)


StartInner = Callable[[DrafterConfig, CachedModel, Tokenizer], DrafterFactory]
"""Starts the process of a cascade's inner drafters and returns their maker. `CachedModel`: the middle one."""


def load_drafters(engine: EngineConfig, device: str, start_inner: StartInner | None = None) -> LoadedDrafters:
    """Load the engine's drafters. Raises `ConfigError` when one is missing, or their tokenizers differ.

    `start_inner`: for a cascade over devices; without it all is loaded here.
    """
    factories: dict[str, Makers] = {}
    vocab_size, num_ids, tokenizer_hash = 0, 0, ""
    notes, models = [], []
    for config in engine.drafters:
        made, model, tokenizer = _load(config, engine, device, start_inner)
        factories[config.kind] = Makers(made.chains, made.trees)
        own_ids = made.num_ids if model is None or tokenizer is None else model.num_ids
        num_ids = min(num_ids or own_ids, own_ids or num_ids)
        if isinstance(model, CachedModel):
            models.append(model)
        if model is None or tokenizer is None:  # fits any target
            continue
        if tokenizer_hash and tokenizer.fingerprint != tokenizer_hash:
            raise ConfigError(f"drafter={config.kind}: its tokenizer differs from that of the drafters before it")
        vocab_size, tokenizer_hash = model.vocab_size, tokenizer.fingerprint
        if config.stages[0].kind == "hf" and model.output_ids is not None:
            notes.append(describe_share(model.output_ids, model.num_ids, tokenizer.encode))
    return LoadedDrafters(factories, vocab_size, tokenizer_hash, num_ids, notes, models)


def _load(
    config: DrafterConfig, engine: EngineConfig, device: str, start_inner: StartInner | None
) -> tuple[OwnDrafters, CachedModel | BlockModel | None, Tokenizer | None]:
    """One drafter's makers, its model, and its tokenizer; None: any will do."""
    if config.kind == "custom":
        return load_own(config, engine, device), None, None
    if config.kind == "ngram":
        make = _ngram_maker(config)
        return OwnDrafters(chains=make, trees=make), None, None
    if config.kind in ("medusa", "dflash"):
        block_model, own_tokenizer = load_block_draft(config, engine, device)
        make = one_by_one(functools.partial(BlockDrafter, block_model))
        return OwnDrafters(chains=make, trees=make), block_model, own_tokenizer
    model, tokenizer = load_draft_model(config, engine, device)
    if config.kind != "cascade":
        chains, trees = _model_makers(config, model)
        return OwnDrafters(chains=chains, trees=trees), model, tokenizer
    if config.inner_device is not None and start_inner is not None and tokenizer is not None:
        inner, num_inner_ids = start_inner(config, model, tokenizer), 0
    else:
        inner, num_inner_ids = _load_inner(config, engine, device, model, tokenizer)
    return OwnDrafters(chains=_cascade_maker(model, inner, num_inner_ids)), model, tokenizer


def _load_inner(
    config: DrafterConfig, engine: EngineConfig, device: str, middle: CachedModel, tokenizer: Tokenizer | None
) -> tuple[DrafterFactory, int]:
    """The maker of a cascade's inner drafters, and their number of ids; 0: all.

    Raises `ConfigError` where it cannot draft for `middle`, which has this tokenizer.
    """
    inner = config.stages[1]
    if inner.kind == "ngram":
        return _ngram_maker(inner), 0
    model, own = load_draft_model(inner, engine, device)
    said = f"drafter.inner={config.inner}"
    if own is None or tokenizer is None or own.fingerprint != tokenizer.fingerprint:
        raise ConfigError(f"{said}: its tokenizer differs from that of {config.model}")
    if model.num_ids > middle.num_ids:
        raise ConfigError(f"{said}: has {model.num_ids} token ids, more than {config.model} ({middle.num_ids})")
    return _model_makers(inner, model)[0], model.num_ids


def _ngram_maker(config: DrafterConfig) -> DrafterFactory:
    earlier = EarlierAnswers(config.remember)
    return one_by_one(lambda: NgramDrafter(config.min_lookup or 1, earlier=earlier))


def _cascade_maker(middle: CachedModel, make_inner: DrafterFactory, num_inner_ids: int = 0) -> DrafterFactory:
    def make(number: int) -> list[Drafter]:
        inner = cast("Sequence[ChainDrafter]", make_inner(number))
        together = zip(middle.new_caches(number, middle.max_length), inner, strict=True)
        return [CascadeDrafter(middle, own, cache=cache, num_inner_ids=num_inner_ids) for cache, own in together]

    return make


def _model_makers(config: DrafterConfig, model: CachedModel) -> tuple[DrafterFactory, DrafterFactory]:
    caches = functools.cache(lambda number: model.new_caches(number, model.max_length, spare=MAX_NODES))
    min_lookup = MIN_LOOKUP if config.min_lookup is None else config.min_lookup
    looks_up = min_lookup > 0 and config.kind in ("embedded", "eagle")

    def maker(kind: Callable[..., Drafter]) -> DrafterFactory:
        def make(cache: KVCache) -> Drafter:
            drafter = kind(model, NgramCache(min_lookup) if looks_up else None, cache=cache)
            if config.kind != "synthetic":
                return drafter
            return SyntheticDrafter(drafter, config.accept, ACCEPT_NEXT, model.vocab_size)

        return lambda number: [make(cache) for cache in caches(number)]

    if config.kind == "eagle":
        return maker(EagleDrafter), maker(EagleDrafter)
    num_ids = model.vocab_size if config.kind == "synthetic" else None
    return maker(AutoregressiveDrafter), maker(functools.partial(ModelTreeDrafter, num_ids=num_ids))
