"""Loads the models of the configured drafters once, and makes drafters over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from amusd.checkpoints.draft_networks import BlockModel
from amusd.checkpoints.loading import load_draft_model
from amusd.checkpoints.tokenizer import Tokenizer
from amusd.checkpoints.vocabulary import describe_share
from amusd.config import DrafterConfig, EngineConfig
from amusd.drafters.base import Drafter, DrafterFactory
from amusd.drafters.block import BlockDrafter
from amusd.drafters.cascade import CascadeDrafter
from amusd.drafters.custom import load_own
from amusd.drafters.eagle import EagleDrafter
from amusd.drafters.model import ModelDrafter
from amusd.drafters.ngram import EarlierAnswers, NgramCache, NgramDrafter
from amusd.drafters.synthetic import SyntheticDrafter
from amusd.errors import ConfigError
from amusd.protocol.draft_tree import MAX_NODES
from amusd.runner.model_runner import ModelRunner

MIN_LOOKUP = 4


@dataclass(frozen=True, slots=True)
class LoadedDrafters:
    """The drafters that a draft worker offers."""

    factories: Mapping[str, DrafterFactory]
    tokenizer_hash: str
    notes: Sequence[str] = ()
    models: Sequence[ModelRunner] = ()


StartInner = Callable[[DrafterConfig, ModelRunner, Tokenizer], DrafterFactory]
"""Starts the process of a cascade's inner drafters and returns their factory. `ModelRunner`: the middle model."""


def load_drafters(engine: EngineConfig, device: str, start_inner: StartInner | None = None) -> LoadedDrafters:
    """Load the engine's drafters. Raises `ConfigError` if one is missing, or tokenizers differ.

    `start_inner`: for a cascade over devices; None: all models are loaded here.
    """
    factories: dict[str, DrafterFactory] = {}
    tokenizer_hash = ""
    notes, models = [], []
    for config in engine.drafters:
        factories[config.kind], loaded, tokenizer = _load(config, engine, device, start_inner)
        models += [model for model in loaded if isinstance(model, ModelRunner)]
        if not loaded or tokenizer is None:  # fits any target
            continue
        if tokenizer_hash and tokenizer.fingerprint != tokenizer_hash:
            raise ConfigError(f"drafter={config.kind}: its tokenizer differs from that of the drafters before it")
        tokenizer_hash = tokenizer.fingerprint
        if config.stages[0].kind == "hf" and (output_ids := loaded[0].output_ids) is not None:
            notes.append(describe_share(output_ids, loaded[0].num_ids, tokenizer.encode))
    return LoadedDrafters(factories, tokenizer_hash, notes, models)


def _load(
    config: DrafterConfig, engine: EngineConfig, device: str, start_inner: StartInner | None
) -> tuple[DrafterFactory, Sequence[ModelRunner | BlockModel], Tokenizer | None]:
    """One kind's factory, its models here, outermost first, and its tokenizer; None: any fits."""
    if config.kind == "custom":
        return load_own(config, engine, device), (), None
    if config.kind == "ngram":
        earlier = EarlierAnswers(config.remember)
        return lambda number: [NgramDrafter(config.min_lookup or 1, earlier) for _ in range(number)], (), None
    model, tokenizer = load_draft_model(config, engine, device)
    if not isinstance(model, ModelRunner):
        return lambda number: [BlockDrafter(model) for _ in range(number)], [model], tokenizer
    if config.kind != "cascade":
        return model_factory(config, model), [model], tokenizer
    below: Sequence[ModelRunner | BlockModel] = ()
    if config.inner_device is not None and start_inner is not None and tokenizer is not None:
        inner = start_inner(config, model, tokenizer)
    else:
        inner, below = _load_inner(config, engine, device, model, tokenizer)
    return cascade_factory(model, inner), [model, *below], tokenizer


def _load_inner(
    config: DrafterConfig, engine: EngineConfig, device: str, middle: ModelRunner, tokenizer: Tokenizer | None
) -> tuple[DrafterFactory, Sequence[ModelRunner | BlockModel]]:
    """The factory of a cascade's inner drafters, and their model. Raises `ConfigError` if they do not fit `middle`."""
    factory, models, own = _load(config.stages[1], engine, device, None)
    for model in models:
        said = f"drafter.inner={config.inner}"
        if own is None or tokenizer is None or own.fingerprint != tokenizer.fingerprint:
            raise ConfigError(f"{said}: its tokenizer differs from that of {config.model}")
        if model.num_ids > middle.num_ids:
            raise ConfigError(f"{said}: has {model.num_ids} token ids, more than {config.model} ({middle.num_ids})")
    return factory, models


def cascade_factory(middle: ModelRunner, make_inner: DrafterFactory) -> DrafterFactory:
    """The factory of cascades of `middle` and the drafters of `make_inner`."""

    def make(num_seqs: int) -> list[Drafter]:
        together = zip(middle.new_caches(num_seqs, middle.max_length), make_inner(num_seqs), strict=True)
        return [CascadeDrafter(middle, inner, cache=cache) for cache, inner in together]

    return make


def model_factory(config: DrafterConfig, model: ModelRunner) -> DrafterFactory:
    """The factory of drafters over `model`."""
    min_lookup = MIN_LOOKUP if config.min_lookup is None else config.min_lookup
    looks_up = min_lookup > 0 and config.kind in ("embedded", "eagle")
    kind = EagleDrafter if config.kind == "eagle" else ModelDrafter

    def make(num_seqs: int) -> list[Drafter]:
        caches = model.new_caches(num_seqs, model.max_length, spare=MAX_NODES)
        if config.kind == "synthetic":
            return [SyntheticDrafter(model, config.accept, cache=cache) for cache in caches]
        return [kind(model, NgramCache(min_lookup) if looks_up else None, cache=cache) for cache in caches]

    return make
