"""Resolves `auto` in a target's configuration: `verify_width` and the dtype.

A CPU computes a 16-bit target in bfloat16, or in float32 with float16 weights, whichever is quicker when timed. The
choice changes tokens, so all processes of a machine must share it: it is made once for each kind of CPU, torch, number
of threads and checkpoint, and kept in the cache folder. A kept choice is read without torch, so that workers need not
wait for its import.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar, get_args

from amusd.config import TargetConfig
from amusd.config.engine import EngineKeys
from amusd.files import CONFIG_JSON, cache_folder
from amusd.logs import logger

if TYPE_CHECKING:
    from torch import Tensor

    from amusd.models.linear import Linear

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Types that `Decoder` computes."""
ROWS = (1, 4, 8)
"""Numbers of rows of the timed products; all count equally."""
LEAST_GAIN = 1.1
"""Speed-up from which float32 is chosen."""
_LEAST_BYTES, _TIMED_BYTES = 10_000_000, 100_000_000
"""A model with fewer bytes than the least is not timed. Most last-level caches hold fewer than the timed bytes."""
_NUM_ROUNDS = 5
_CORE_FACTS = ("vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "flags")

Dtype: TypeAlias = Literal["bfloat16", "float32"]
Keys = TypeVar("Keys", bound=EngineKeys)


def settle(config: Keys, device: str) -> Keys:
    """`config` with `verify_width` resolved, and the dtype as in `settle_dtype`. Raises as `settle_dtype`."""
    config = settle_dtype(config, device)
    if config.verify_width != "auto":
        return config
    reason = why_bits_vary(config)
    if reason is not None:
        logger.info("verify_width=bucketed: %s, so that padding would not keep the bits of a token's logits", reason)
    return replace(config, verify_width="fixed" if reason is None else "bucketed")


def why_bits_vary(config: EngineKeys) -> str | None:
    """Why even padded passes change the bits of the target's rows; None: no reason is known."""
    model = config.target.model
    if model is None or config.hardware.synthetic is not None or _is_own(model):
        return None
    from amusd.checkpoints import configuration  # which imports torch

    return configuration.why_rows_vary(configuration.load_config(model))


def _is_own(model: str) -> bool:
    """Whether `model` is a local folder of a type that `Decoder` computes."""
    with suppress(OSError, RuntimeError, ValueError, AttributeError, TypeError):  # `load_config` reports the error
        return json.loads((Path(model).expanduser() / CONFIG_JSON).read_bytes()).get("model_type") in MODEL_TYPES
    return False


def settle_dtype(config: Keys, device: str, cache: Path | None = None) -> Keys:
    """`config` with the target's dtype instead of `auto`, if timing decides the dtype.

    Timing decides on a CPU, for a checkpoint that one rank computes. `cache`: the folder of choices. Raises
    `ConfigError` for a missing checkpoint.
    """
    is_timed = device == "cpu" and config.hardware.synthetic is None and config.target_tensor_parallel_size == 1
    if not is_timed or config.target.dtype != "auto" or config.target.model_impl == "transformers":
        return config
    num_threads, model = config.hardware.num_threads, config.target.model
    facts = [*_core_facts(), importlib.metadata.version("torch"), f"{num_threads} threads", str(model)]
    if model is not None and (folder := Path(model).expanduser()).is_dir():
        facts.append(str(folder.absolute()))
        with suppress(OSError):  # loading reports the error
            facts.append((folder / CONFIG_JSON).read_text(encoding="utf-8", errors="replace"))  # the file may change
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    file = (cache or cache_folder()) / f"dtype-{digest}.txt"
    dtype = _kept_in(file)
    if not dtype and (found := quickest_dtype(config.target, num_threads)):
        dtype = _keep(file, found)
    return replace(config, target=replace(config.target, dtype=dtype)) if dtype else config


def quickest_dtype(target: TargetConfig, num_threads: int) -> Dtype | None:
    """The dtype in which products with the target's first layers take the least time. Takes about a second.

    None for a model that fits in a cache, whose products take no time. Raises `ConfigError` for a missing checkpoint.
    """
    import torch

    from amusd.checkpoints.checkpoint import open_checkpoint
    from amusd.checkpoints.loading import model_path
    from amusd.models.linear import Weights, can_multiply_bfloat16, fits_fp16, make_linear, multiplies_fp16

    layers: list[Weights] = []
    for name, matrix in open_checkpoint(model_path(target)).items():
        if name.endswith("_proj.weight") and sum(each.matrix.nbytes for each in layers) < _TIMED_BYTES:
            layers.append(Weights(matrix))
    if sum(each.matrix.nbytes for each in layers) < _LEAST_BYTES:
        return None
    if not can_multiply_bfloat16():
        return "float32"
    are_exact = all(each.matrix.itemsize == 2 and fits_fp16(each.matrix) for each in layers)
    if not (are_exact and multiplies_fp16(torch.device("cpu"), torch.float32)):
        return "bfloat16"
    torch.set_num_threads(num_threads)
    kinds = {dtype: [make_linear(each, dtype) for each in layers] for dtype in (torch.bfloat16, torch.float32)}
    seconds = {(dtype, rows): math.inf for dtype in kinds for rows in ROWS}
    for _ in range(_NUM_ROUNDS):
        for (dtype, rows), least in [*seconds.items()]:
            inputs = [torch.ones(rows, each.matrix.shape[1], dtype=dtype) for each in layers]
            seconds[dtype, rows] = min(least, _seconds_of(kinds[dtype], inputs))
    gains = [seconds[torch.bfloat16, rows] / seconds[torch.float32, rows] for rows in ROWS]
    return "float32" if math.prod(gains) > LEAST_GAIN ** len(ROWS) else "bfloat16"


def _seconds_of(linears: Sequence[Linear], inputs: Sequence[Tensor]) -> float:
    import torch

    start = time.perf_counter()
    with torch.inference_mode():
        for linear, rows in zip(linears, inputs, strict=True):
            linear(rows)
    return time.perf_counter() - start


def _kept_in(file: Path) -> Dtype | None:
    with suppress(OSError, ValueError):
        return next((dtype for dtype in get_args(Dtype) if dtype == file.read_text(encoding="utf-8")), None)
    return None


def _keep(file: Path, dtype: Dtype) -> Dtype:
    """Write a choice unless another process has; return the file's choice."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=".") as partial:
            partial.write(dtype)
            partial.flush()
            os.link(partial.name, file)  # fails if the file exists
    return _kept_in(file) or dtype


def _core_facts() -> list[str]:
    """Facts that distinguish kinds of CPU."""
    with suppress(OSError):
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
        return [line for line in first.splitlines() if line.partition(":")[0].strip() in _CORE_FACTS]
    return [platform.processor(), platform.machine()]
