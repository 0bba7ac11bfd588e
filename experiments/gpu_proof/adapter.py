"""The only module of the proof that imports names of the package that are not stable."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from amusd.checkpoints.loading import load_draft_model, load_target
from amusd.config import DrafterConfig, EngineConfig, HardwareConfig
from amusd.config.engine import ModelShape
from amusd.drafters.factory import load_drafters
from amusd.models.kv_cache import KVCache
from amusd.runner.model_runner import ModelRunner
from amusd.runtime.verifier import prepare_to_verify

WIDTH = 8
"""Most rows of a target pass."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model in the state in which a worker has it before its first request."""

    model: ModelRunner
    cache: KVCache
    load_seconds: float
    prepare_seconds: float
    """Seconds of capturing, if passes are captured."""


def engine_config(
    device: str, target: ModelShape, draft: ModelShape, *, accept: float = 0.8, max_model_len: int = 2048
) -> EngineConfig:
    """A pair with random weights on one device, for one sequence: with more, a pass would have rows for all."""
    return EngineConfig(
        drafters=(DrafterConfig(kind="synthetic", shape=draft, accept=accept),),
        hardware=HardwareConfig(synthetic=target, devices=(device, device)),
        max_verify_width=WIDTH,
        max_num_seqs=1,
        max_model_len=max_model_len,
        prefix_caching=False,  # prompts are answered several times
    )


def prepared_target(config: EngineConfig) -> Prepared:
    """The target's model and its cache."""
    return _prepared(lambda: load_target(config, config.hardware.devices[0])[0], prepare_to_verify)


def prepared_draft(config: EngineConfig) -> Prepared:
    """The model of the only drafter, and the cache of its chains."""

    def prepare(model: ModelRunner, cache: KVCache) -> None:
        model.prepare(cache)
        model.prepare(cache, steps=model.tokens_per_step)

    return _prepared(lambda: load_draft_model(config.drafters[0], config, config.hardware.devices[-1])[0], prepare)


def _prepared(load: Callable[[], ModelRunner], prepare: Callable[[ModelRunner, KVCache], object]) -> Prepared:
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


def prepared_drafters(config: EngineConfig) -> tuple[float, float, object]:
    """Load a drafter over a model, and capture where passes are captured.

    Returns the seconds of both, and what keeps the graphs alive.
    """
    started = time.perf_counter()
    device = config.hardware.devices[-1]
    loaded = load_drafters(config, device)
    ready = time.perf_counter()
    kept = loaded.factories[config.drafters[0].kind](1)
    _wait_for(torch.device(device))
    return ready - started, time.perf_counter() - ready, kept


def num_graphs() -> int:
    """Number of CUDA graphs alive in this process."""
    gc.collect()
    return sum(isinstance(found, torch.cuda.CUDAGraph) for found in gc.get_objects())
