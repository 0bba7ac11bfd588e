"""Finds the fastest way of a model's passes on a GPU that computes what torch's plain operators compute.

What is fast is left out in this order: CUDA graphs, Triton's kernels, torch's fused attention of prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from amusd.errors import AmusdError, first_line
from amusd.models.graphs import run_each_time, send
from amusd.models.kv_cache import KVCache
from amusd.models.passes import Rows
from amusd.sampling.noise import codes_of
from amusd.sampling.noisy_scores import FOR_GOOD, noisy_scores, without_triton

if TYPE_CHECKING:
    from amusd.models.cached_model import CachedModel

logger = logging.getLogger(__name__)

_PROMPT_LENGTH = 70
"""More than one block of `attend_rows`."""
_LEAST_LIMIT, _LIMIT_IN_EPSILONS = 0.01, 32
"""Largest difference: 0.25 in bfloat16, where rounding makes 0.015 (random weights) to 0.05, defects 0.3 and more."""


def find_way(model: CachedModel) -> tuple[str, KVCache]:
    """Leave out what fails or computes something else, and say so; returns the way in words.

    The cache keeps the memory of captured graphs until others share it. Raises `AmusdError` for a lost device.
    """
    capture, model.capture = model.capture, run_each_time
    with without_triton(), sdpa_kernel(SDPBackend.MATH):
        expected, cache = _compute(model)
    model.capture = capture
    limit = max(_LEAST_LIMIT, _LIMIT_IN_EPSILONS * torch.finfo(model.network.cache_dtype).eps)
    parts: Mapping[str, Callable[[], object]] = {
        "": lambda: None,
        "CUDA graphs": partial(setattr, model, "capture", run_each_time),
        "Triton": lambda: FOR_GOOD.enter_context(without_triton()),
        "fused attention of prompts": lambda: FOR_GOOD.enter_context(sdpa_kernel(SDPBackend.MATH)),
    }
    reasons, left_out = list[str](), ""
    for name, leave_out in parts.items():
        leave_out()
        left_out += f", {name}" if left_out else name
        try:
            found, cache = _compute(model)
            difference = _difference(found, expected)
            reasons.append(f"results differ from those of plain torch by {difference:.2g} standard deviations")
            if difference <= limit:
                break
        except AmusdError:
            raise
        except Exception as error:  # noqa: BLE001 - Triton's own errors have no common base
            reasons.append(first_line(error))
    if left_out:
        logger.warning("amusd: %s computes without %s, which is slower: %s", model.device, left_out, reasons[0])
    return f"computed without {left_out or 'leaving out anything'}; {reasons[-1]}", cache


def _compute(model: CachedModel) -> tuple[Tensor, KVCache]:
    """float32 [2, rows, vocab], logits of the last rows behind a prompt and samplers' noise; and the cache."""
    length = min(_PROMPT_LENGTH + model.numerics.width, model.max_length)
    num_rows = min(model.numerics.width, length)
    token_ids = [place * place % model.num_ids for place in range(length)]
    cache = model.new_cache(length)
    model.prefill(token_ids[:-num_rows], cache)
    [output] = model.run([Rows(token_ids[-num_rows:], cache)])
    logits, keys = output.logits.float(), torch.arange(num_rows, device=model.device)
    codes = send(codes_of(model.vocab_size), model.device)
    noise = noisy_scores(torch.zeros_like(logits), codes, keys, torch.ones_like(keys).float())
    return torch.stack((logits, noise)), cache


def _difference(found: Tensor, expected: Tensor) -> float:
    """Mean over rows of their root mean square difference, in standard deviations of `expected`; the larger of both.

    Not the largest row's: in bfloat16 that is 0.08 for a trained model. 0 where `expected` is not finite (its weights
    are damaged).
    """
    if not bool(expected.isfinite().all()):
        return 0.0
    differences = (found - expected).square().mean(2).sqrt() / expected.std(2)
    return float(differences.mean(1).nan_to_num(torch.inf).max())
