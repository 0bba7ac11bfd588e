"""Finds the fastest way of a model's passes on a GPU that computes what torch's plain operators compute.

What is fast is left out in this order: CUDA graphs, Triton's kernels, torch's fused attention of prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amusd.errors import AmusdError, first_line
from amusd.models.graphs import run_each_time, send
from amusd.models.kv_cache import KVCache
from amusd.models.passes import Rows
from amusd.sampling.noise import codes_of
from amusd.sampling.noisy_scores import noisy_scores, turn_off_triton, uses_triton, without_triton

if TYPE_CHECKING:
    from amusd.models.cached_model import CachedModel

logger = logging.getLogger(__name__)

_PROMPT_LENGTH = 70
"""More than one block of `attend_rows`."""
_LEAST_LIMIT, _LIMIT_IN_EPSILONS = 0.01, 32
"""Largest difference: 0.25 in bfloat16, where rounding makes 0.015 (random weights) to 0.05, defects 0.3 and more."""


def find_way(model: CachedModel) -> tuple[str, KVCache]:
    """Leave out what fails, or makes other logits; says so, and returns the way in words.

    The cache keeps the memory of captured graphs until others share it. Raises `AmusdError` for a lost device, and
    `torch.OutOfMemoryError`.
    """
    with without_triton(), _plain(model):
        expected, cache = _compute(model)
    limit = max(_LEAST_LIMIT, _LIMIT_IN_EPSILONS * torch.finfo(model.network.cache_dtype).eps)
    left_out, reason = list[str](), ""
    while True:
        try:
            logits, cache = _compute(model)
            found = _difference(logits, expected)
        except (AmusdError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - Triton's own errors have no common base
            problem, found = first_line(error), torch.inf
        else:
            problem = f"results differ by {found:.2g} standard deviations"
        if found <= limit or (part := _leave_out(model)) is None:
            break
        left_out.append(part)
        reason = reason or problem
    if left_out:
        logger.warning("amusd: %s computes without %s, which is slower: %s", model.device, ", ".join(left_out), reason)
    way = "CUDA graphs" if model.capture is not run_each_time else "no CUDA graphs"
    way += f", kernels of {'Triton' if uses_triton() else 'torch'}"
    return f"{way}; results differ from those of plain torch by {found:.2g} standard deviations", cache


def _leave_out(model: CachedModel) -> str | None:
    """Turn off the next part that is on, and return its name; None: all are off."""
    if model.capture is not run_each_time:
        model.capture = run_each_time
        return "CUDA graphs"
    if uses_triton():
        turn_off_triton()
        return "Triton"
    if _uses_fused_attention():
        _set_fused_attention(enabled=False)
        return "fused attention of prompts"
    return None


@contextmanager
def _plain(model: CachedModel) -> Iterator[None]:
    """Inside, nothing is captured, and prompts are attended to without fused kernels."""
    capture, was_fused = model.capture, _uses_fused_attention()
    model.capture = run_each_time
    _set_fused_attention(enabled=False)
    try:
        yield
    finally:
        model.capture = capture
        _set_fused_attention(enabled=was_fused)


def _uses_fused_attention() -> bool:
    return bool(torch.backends.cuda.flash_sdp_enabled())  # type: ignore[no-untyped-call]  # torch is untyped here


def _set_fused_attention(*, enabled: bool) -> None:
    torch.backends.cuda.enable_flash_sdp(enabled)
    torch.backends.cuda.enable_mem_efficient_sdp(enabled)


def _compute(model: CachedModel) -> tuple[Tensor, KVCache]:
    """float32 [2, rows, vocab], the logits of the last rows behind a prompt and samplers' noise; and the cache."""
    length = min(_PROMPT_LENGTH + model.numerics.width, model.max_length)
    num_rows = min(model.numerics.width, length)
    token_ids = [place * place % model.num_ids for place in range(length)]
    cache = model.new_cache(length)
    model.prefill(token_ids[:-num_rows], cache)
    [output] = model.run([Rows(token_ids[-num_rows:], cache)])
    logits, keys = output.logits.float(), torch.arange(num_rows, device=model.device)
    codes = send(codes_of(model.vocab_size), model.device)
    return torch.stack(
        (logits, noisy_scores(torch.zeros_like(logits), codes, keys, torch.ones_like(keys).float()))
    ), cache


def _difference(found: Tensor, expected: Tensor) -> float:
    """Mean over rows of their root mean square difference, in standard deviations of `expected`; the larger of both.

    Not the largest row's: in bfloat16 that is 0.08 for a trained model. 0 where `expected` is not finite (its weights
    are damaged).
    """
    if not bool(expected.isfinite().all()):
        return 0.0
    differences = (found - expected).square().mean(2).sqrt() / expected.std(2)
    return float(differences.mean(1).nan_to_num(torch.inf).max())
