"""The only module of the proof that reaches beyond the package's stable names. Who changes those mends them here.

roles                 `load_target`, `load_draft_model`: a model exactly as a worker of that role has it
drafters              `load_drafters`, and one step of a tree (`Drafter.expand` over nodes)
graphs                live `torch.cuda.CUDAGraph` objects, whoever holds them
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from amusd.config import Distribution, DrafterConfig, EngineConfig, HardwareConfig
from amusd.config.engine import ModelShape
from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.base import Drafter
from amusd.drafters.factory import load_drafters
from amusd.models.cached_model import CachedModel
from amusd.models.language_model import KVCache
from amusd.models.loading import load_draft_model, load_target
from amusd.protocol.draft_session import Node, Transition
from amusd.runtime.verifier import prepare_to_verify

WIDTH = 8
"""Rows of a target pass."""
FAN_OUT = 8


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model as a worker has it before the first request."""

    model: CachedModel
    cache: KVCache
    load_seconds: float
    prepare_seconds: float
    """Of capturing, where passes are captured."""


def engine_config(
    device: str, target: ModelShape, draft: ModelShape, *, accept: float = 0.8, max_model_len: int = 2048
) -> EngineConfig:
    """A pair with random weights on one device."""
    return EngineConfig(
        drafters=(DrafterConfig(kind="synthetic", shape=draft, accept=accept),),
        hardware=HardwareConfig(synthetic=target, devices=(device, device)),
        max_verify_width=WIDTH,
        max_model_len=max_model_len,
    )


def prepared_target(config: EngineConfig) -> Prepared:
    """The target's model with its cache."""
    return _prepared(lambda: load_target(config, config.hardware.devices[0])[0], prepare_to_verify)


def prepared_draft(config: EngineConfig) -> Prepared:
    """The model of the (only) drafter with the cache of its chains."""

    def prepare(model: CachedModel, cache: KVCache) -> None:
        model.prepare(cache)
        model.prepare(cache, steps=model.tokens_per_step)

    return _prepared(lambda: load_draft_model(config.drafters[0], config, config.hardware.devices[-1])[0], prepare)


def _prepared(load: Callable[[], CachedModel], prepare: Callable[[CachedModel, KVCache], object]) -> Prepared:
    started = time.perf_counter()
    model = load()
    loaded = time.perf_counter()
    cache = model.new_cache(model.max_length)
    prepare(model, cache)
    _wait_for(model.device)
    return Prepared(model, cache, loaded - started, time.perf_counter() - loaded)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class PreparedDrafters:
    """A chain drafter and a tree drafter over one model, as the draft worker has both."""

    chain: Drafter
    tree: Drafter
    load_seconds: float
    prepare_seconds: float


def prepared_drafters(config: EngineConfig) -> PreparedDrafters:
    """Load, and capture where passes are captured."""
    started = time.perf_counter()
    device = config.hardware.devices[-1]
    loaded = load_drafters(config, device)
    ready = time.perf_counter()
    kind = config.drafters[0].kind
    (chain,), (tree,) = (make(1) for make in loaded.factories[kind])
    _wait_for(torch.device(device))
    return PreparedDrafters(chain, tree, ready - started, time.perf_counter() - ready)


def tree_step(drafter: Drafter, prompt: list[int], num_nodes: int) -> Callable[[], None]:
    """One step of a draft tree over `num_nodes` nodes behind `prompt`, choosing included, to be repeated."""
    capacity = len(prompt) + 64
    drafter.open(prompt, capacity, FAN_OUT)
    root = Node(None, prompt[-1], len(prompt) - 1, 1.0, 1.0)
    drafter.expand(root, [root])

    def step() -> None:
        nodes = [Node(root, 3 + number, len(prompt), 0.1, 0.1) for number in range(num_nodes)]
        drafter.expand(root, nodes)
        drafter.follow(Transition((), (), None, len(prompt), 0, 0))  # the nodes are gone, their slots free

    return step


SAMPLED = {
    "temperature": Distribution(temperature=0.7, seed=3),
    "filters": Distribution(temperature=0.7, top_p=0.95, seed=3),
}
"""How the tokens of timed draft steps are drawn."""


def sampled_steps(model: CachedModel, distribution: Distribution, prompt: list[int], number: int) -> Callable[[], None]:
    """Draft `number` tokens behind `prompt`, drawing included, to be repeated."""
    drafter = AutoregressiveDrafter(model)
    drafter.set_distribution(distribution)
    drafter.open(prompt, len(prompt) + number)

    def steps() -> None:
        drafter.propose(number)
        drafter.truncate(len(prompt))

    return steps


def num_graphs() -> int:
    """CUDA graphs that are alive in this process."""
    gc.collect()
    return sum(isinstance(found, torch.cuda.CUDAGraph) for found in gc.get_objects())
