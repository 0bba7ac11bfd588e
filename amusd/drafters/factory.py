"""Loads the models of the configured drafters once, and makes drafters over them, one for each of several sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from amusd.config import DrafterConfig, EngineConfig
from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.base import ChainDrafter, Drafter, DrafterFactory, Makers, one_by_one
from amusd.drafters.block import BlockDrafter
from amusd.drafters.cascade import CascadeDrafter
from amusd.drafters.custom import load_own
from amusd.drafters.eagle import EagleDrafter
from amusd.drafters.ngram import EarlierAnswers, NgramCache, NgramDrafter
from amusd.drafters.synthetic import ACCEPT_NEXT, SyntheticDrafter
from amusd.drafters.tree import ModelTreeDrafter
from amusd.errors import ConfigError
from amusd.models.block_models import BlockModel
from amusd.models.cached_model import CachedModel
from amusd.models.kv_cache import PreallocatedCache
from amusd.models.loading import load_block_draft, load_draft_model
from amusd.models.tokenizer import Tokenizer
from amusd.models.vocabulary import describe_share
from amusd.protocol.draft_session import MAX_NODES

MIN_LOOKUP = 4
"""Tokens of the shortest suffix that is looked up beside a model, where `drafter.min_lookup` says nothing."""


@dataclass(frozen=True, slots=True)
class LoadedDrafters:
    """The drafters that a draft worker offers."""

    factories: Mapping[str, Makers]
    """The makers of drafters, by the configuration's `kind`."""
    vocab_size: int
    """The models' vocabulary size; 0 without one."""
    tokenizer_hash: str
    """The fingerprint of the models' tokenizer; empty where every drafter works with any."""
    num_ids: int = 0
    """Token ids that every model takes in: `[0, num_ids)`; 0 where none has to."""
    notes: Sequence[str] = ()
    """Lines that people should see, about drafters whose tokenizer is not the target's."""
    models: Sequence[CachedModel] = ()
    """Those that keep a cache of the text."""

    def names(self, *, drafts_trees: bool) -> tuple[str, ...]:
        """Return the names of the drafters of trees, or of chains."""
        return tuple(name for name, makers in self.factories.items() if makers[drafts_trees] is not None)


StartInner = Callable[[DrafterConfig, CachedModel, Tokenizer], DrafterFactory]
"""Starts the process of a cascade's inner drafters; returns what makes them. `CachedModel`: the one in the middle."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """One configured drafter."""

    makers: Makers
    model: CachedModel | BlockModel | None = None
    tokenizer: Tokenizer | None = None
    """The tokenizer that its model needs; None: any will do."""
    num_ids: int = 0
    """As in `LoadedDrafters`."""

    @classmethod
    def over(cls, makers: Makers, model: CachedModel | BlockModel, tokenizer: Tokenizer | None) -> _Loaded:
        """Drafters over a model. Without a tokenizer they bring ids into their model's range by themselves."""
        return cls(makers, model, tokenizer, 0 if tokenizer is None else model.num_ids)


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loads drafters for one engine. Each method loads one or several kinds."""

    engine: EngineConfig
    device: str
    start_inner: StartInner | None

    def ngram(self, config: DrafterConfig) -> _Loaded:
        """Prompt lookup. Chains and trees remember the same earlier answers."""
        make = _ngram_maker(config)
        return _Loaded(Makers(make, make))

    def custom(self, config: DrafterConfig) -> _Loaded:
        """Drafters from outside of the package."""
        own = load_own(config, self.engine, self.device)
        return _Loaded(Makers(own.chains, own.trees), num_ids=own.num_ids)

    def block(self, config: DrafterConfig) -> _Loaded:
        """Drafters that score a block at once, chains and trees alike."""
        model, tokenizer = load_block_draft(config, self.engine, self.device)
        make = one_by_one(functools.partial(BlockDrafter, model))
        return _Loaded.over(Makers(make, make), model, tokenizer)

    def language_model(self, config: DrafterConfig) -> _Loaded:
        """Drafters with a language model of their own."""
        model, tokenizer = load_draft_model(config, self.engine, self.device)
        return _Loaded.over(Makers(*_model_makers(config, model)), model, tokenizer)

    def cascade(self, config: DrafterConfig) -> _Loaded:
        """Chains of a model in the middle, for which inner drafters draft, here or in a process of their own."""
        model, tokenizer = load_draft_model(config, self.engine, self.device)
        if config.inner_device is not None and self.start_inner is not None and tokenizer is not None:
            inner, num_inner_ids = self.start_inner(config, model, tokenizer), 0
        else:
            inner, num_inner_ids = self._inner(config, model, tokenizer)
        return _Loaded.over(Makers(_cascade_maker(model, inner, num_inner_ids)), model, tokenizer)

    def _inner(
        self, config: DrafterConfig, middle: CachedModel, tokenizer: Tokenizer | None
    ) -> tuple[DrafterFactory, int]:
        """The maker of a cascade's inner drafters, and how many token ids they take in; 0: all.

        Raises `ConfigError` where it cannot draft for `middle`, which has this tokenizer.
        """
        inner = config.stages[1]
        if inner.kind == "ngram":
            return _ngram_maker(inner), 0
        model, own = load_draft_model(inner, self.engine, self.device)
        if own is None or tokenizer is None or own.fingerprint != tokenizer.fingerprint:
            raise ConfigError(f"drafter.inner={config.inner}: its tokenizer differs from that of {config.model}")
        if model.num_ids > middle.num_ids:
            raise ConfigError(
                f"drafter.inner={config.inner}: has {model.num_ids} token ids, more than {config.model} "
                f"({middle.num_ids})"
            )
        return _model_makers(inner, model)[0], model.num_ids


LOADERS: Mapping[str, Callable[[_Loader, DrafterConfig], _Loaded]] = MappingProxyType(
    {
        "embedded": _Loader.language_model,
        "hf": _Loader.language_model,
        "eagle": _Loader.language_model,
        "medusa": _Loader.block,
        "dflash": _Loader.block,
        "cascade": _Loader.cascade,
        "ngram": _Loader.ngram,
        "self": _Loader.language_model,
        "synthetic": _Loader.language_model,
        "custom": _Loader.custom,
    }
)
"""How each kind of `CAPABILITIES` is loaded. A new kind is one line here and one there."""


def load_drafters(engine: EngineConfig, device: str, start_inner: StartInner | None = None) -> LoadedDrafters:
    """Load what the engine's drafters need. Raises `ConfigError` when one cannot be had, or their tokenizers differ.

    `start_inner`: for a cascade over devices; without it all is loaded here.
    """
    loader = _Loader(engine, device, start_inner)
    factories: dict[str, Makers] = {}
    vocab_size, num_ids, tokenizer_hash = 0, 0, ""
    notes, models = [], []
    for config in engine.drafters:
        loaded = LOADERS[config.kind](loader, config)
        factories[config.kind] = loaded.makers
        num_ids = min(num_ids or loaded.num_ids, loaded.num_ids or num_ids)
        model, tokenizer = loaded.model, loaded.tokenizer
        if isinstance(model, CachedModel):
            models.append(model)
        if model is None or tokenizer is None:
            continue
        if tokenizer_hash and tokenizer.fingerprint != tokenizer_hash:
            raise ConfigError(f"drafter={config.kind}: its tokenizer differs from that of the drafters before it")
        vocab_size, tokenizer_hash = model.vocab_size, tokenizer.fingerprint
        if config.stages[0].kind == "hf" and model.output_ids is not None:
            notes.append(describe_share(model.output_ids, model.num_ids, tokenizer.encode))
    return LoadedDrafters(factories, vocab_size, tokenizer_hash, num_ids, notes, models)


def _ngram_maker(config: DrafterConfig) -> DrafterFactory:
    earlier = EarlierAnswers(config.remember) if config.remember else None
    return one_by_one(lambda: NgramDrafter(config.min_lookup or 1, earlier=earlier))


def _cascade_maker(middle: CachedModel, make_inner: DrafterFactory, num_inner_ids: int = 0) -> DrafterFactory:
    """The maker of chains by `middle` and by inner drafters, which are chains, too."""

    def make(number: int) -> list[Drafter]:
        made: list[Drafter] = []
        for cache, inner in zip(middle.new_caches(number, middle.max_length), make_inner(number), strict=True):
            assert isinstance(inner, ChainDrafter)
            made.append(CascadeDrafter(middle, inner, cache=cache, num_inner_ids=num_inner_ids))
        return made

    return make


def _model_makers(config: DrafterConfig, model: CachedModel) -> tuple[DrafterFactory, DrafterFactory]:
    """The makers of chains and of trees over one set of caches: the i-th drafters of both have the same one."""
    caches = functools.cache(lambda number: model.new_caches(number, model.max_length, spare=MAX_NODES))

    def lookup() -> NgramCache | None:
        least = MIN_LOOKUP if config.min_lookup is None else config.min_lookup
        return NgramCache(least) if least and config.kind in ("embedded", "eagle") else None

    def maker(make: Callable[[PreallocatedCache], Drafter]) -> DrafterFactory:
        return lambda number: [make(cache) for cache in caches(number)]

    def synthetic(drafter: Drafter) -> Drafter:
        return SyntheticDrafter(drafter, config.accept, ACCEPT_NEXT, model.vocab_size)

    if config.kind == "eagle":
        eagle = maker(lambda cache: EagleDrafter(model, lookup(), cache=cache))
        return eagle, eagle
    if config.kind == "synthetic":
        return (
            maker(lambda cache: synthetic(AutoregressiveDrafter(model, cache=cache))),
            maker(lambda cache: synthetic(ModelTreeDrafter(model, num_ids=model.vocab_size, cache=cache))),
        )
    return (
        maker(lambda cache: AutoregressiveDrafter(model, lookup(), cache=cache)),
        maker(lambda cache: ModelTreeDrafter(model, lookup(), cache=cache)),
    )
