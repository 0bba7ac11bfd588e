"""Finds the fastest way to compute a GPU's passes that agrees with torch's plain operators.

Fast parts are left out in this order: CUDA graphs, Triton's kernels, torch's fused attention of prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from amusd.errors import AmusdError, first_line
from amusd.logs import logger
from amusd.models.fused import silu_and_multiply
from amusd.models.kv_cache import KVCache
from amusd.models.passes import Rows
from amusd.runner.graphs import run_each_time
from amusd.sampling.noise import noisy_scores
from amusd.sampling.operators import Triton, without_triton

if TYPE_CHECKING:
    from amusd.runner.model_runner import ModelRunner


_PROMPT_LENGTH = 70
"""Prompt tokens: more than one block of `attend_rows`."""
_LEAST_LIMIT, _LIMIT_IN_EPSILONS = 0.01, 32
"""Largest accepted `_difference`: 0.25 in bfloat16; rounding gives 0.015 to 0.05, defects 0.3 and more."""


def find_way(model: ModelRunner, cache: KVCache) -> str:
    """Leave out fast parts until results agree with plain torch's, and log which; returns the way in words.

    `cache` is empty before and after, and keeps the graphs captured here. Raises `AmusdError` for a lost device.
    """
    length = min(_PROMPT_LENGTH + model.numerics.width, cache.capacity)
    capture, model.capture = model.capture, run_each_time
    with without_triton(), sdpa_kernel(SDPBackend.MATH):
        expected = _compute(model, model.new_cache(length), length)
    model.capture = capture
    limit = max(_LEAST_LIMIT, _LIMIT_IN_EPSILONS * torch.finfo(model.network.cache_dtype).eps)
    parts: Mapping[str, Callable[[], object]] = {
        "": lambda: None,
        "CUDA graphs": partial(setattr, model, "capture", run_each_time),
        "Triton": partial(setattr, Triton, "is_used", False),
        "fused attention of prompts": _leave_out_fused_attention,
    }
    reasons, left_out = list[str](), ""
    for name, leave_out in parts.items():
        leave_out()
        left_out += f", {name}" if left_out else name
        try:
            difference = _difference(_compute(model, cache, length), expected)
            reasons.append(f"results differ from those of plain torch by {difference:.2g} standard deviations")
            if difference <= limit:
                break
        except AmusdError:
            raise
        except Exception as error:  # noqa: BLE001 - Triton's own errors have no common base
            reasons.append(first_line(error))
    cache.truncate(0)
    if left_out:
        logger.warning("%s computes without %s, which is slower: %s", model.device, left_out, reasons[0])
    return f"computed {f'without {left_out}' if left_out else 'with every fast part'}; {reasons[-1]}"


def try_triton(device: str) -> None:
    """Run a first Triton kernel on `device`; if it fails, let torch compute instead, and log a warning.

    Triton compiles its launcher with the machine's C compiler and Python's headers.
    """
    try:
        silu_and_multiply(torch.zeros((1, 2), device=device))
    except Exception as error:  # noqa: BLE001 - Triton's own errors have no common base
        Triton.is_used = False
        hint = "brings Triton, which needs a C compiler and Python.h (Debian, Ubuntu: apt install gcc python3-dev)"
        reason = f"{first_line(error)}; pip install 'amusd[gpu]' {hint}"
        logger.warning("%s computes without Triton, which is slower: %s", device, reason)


def _leave_out_fused_attention() -> None:
    torch.backends.cuda.enable_flash_sdp(enabled=False)
    torch.backends.cuda.enable_mem_efficient_sdp(enabled=False)


def _compute(model: ModelRunner, cache: KVCache, length: int) -> Tensor:
    """float32 [2, rows, vocab]: logits of a prompt's last rows, and noise. Graphs are captured anew."""
    cache.truncate(0)
    model.wipe(cache)
    cache.captured.graphs.clear()
    num_rows = min(model.numerics.width, length)
    token_ids = [place * place % model.num_ids for place in range(length)]
    model.prefill(token_ids[:-num_rows], cache)
    [output] = model.run([Rows(token_ids[-num_rows:], cache)])
    logits, keys = output.logits.float(), torch.arange(num_rows, device=model.device)
    codes, scale = model.sampling_state(cache)[0].codes, torch.ones_like(keys).float()
    noise = noisy_scores(torch.zeros_like(logits), codes, keys, scale)
    return model.fetch(torch.stack((logits, noise)))


def _difference(found: Tensor, expected: Tensor) -> float:
    """The larger difference, of logits or noise, in standard deviations of `expected`.

    Each is a row's root mean square, averaged over the rows, since one row of a trained model may reach 0.08 in
    bfloat16. 0 if `expected` is not finite (damaged weights).
    """
    if not expected.isfinite().all() or torch.equal(found, expected):
        return 0.0
    differences = (found - expected).square().mean(2).sqrt() / expected.std(2)
    return float(differences.mean(1).nan_to_num(torch.inf).max())
