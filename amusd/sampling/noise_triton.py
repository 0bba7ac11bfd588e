"""`noisy_scores` as one Triton kernel: each program scores a block of columns of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from amusd.sampling.noise import FIRST_FACTOR, LAST_SHIFT, ROUNDS, UNIT

_BLOCK = 1024


def noisy_scores(logits: Tensor, codes: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
    """See `amusd.sampling.noise.noisy_scores`."""
    rows, columns = logits.shape
    logits, halves = logits.contiguous(), keys.unsqueeze(1).view(torch.int32)  # low, high
    scores = torch.empty((rows, columns), dtype=torch.float32, device=logits.device)
    (second_shift, second), (third_shift, third) = ROUNDS
    grid = (triton.cdiv(columns, _BLOCK), rows)
    _kernel[grid](
        logits, codes, halves, halves.stride(0), scale.contiguous(), scores, columns,
        FIRST_FACTOR, second_shift, second, third_shift, third, LAST_SHIFT, UNIT, _BLOCK,
    )  # fmt: skip
    return scores


@triton.jit  # type: ignore[untyped-decorator]  # Triton is untyped
def _kernel(  # type: ignore[no-untyped-def]
    logits, codes, halves, halves_stride, scale, scores, columns,
    first: tl.constexpr, second_shift: tl.constexpr, second: tl.constexpr, third_shift: tl.constexpr,
    third: tl.constexpr, last_shift: tl.constexpr, unit: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    column = tl.program_id(0) * block + tl.arange(0, block)
    inside = column < columns
    low = tl.load(halves + halves_stride * row).to(tl.uint32, bitcast=True)
    high = tl.load(halves + halves_stride * row + 1).to(tl.uint32, bitcast=True)
    number = tl.load(codes + column, mask=inside, other=0).to(tl.uint32, bitcast=True)
    number = (number ^ low) * first + high
    number = (number ^ (number >> second_shift)) * second
    number = (number ^ (number >> third_shift)) * third
    number = (number ^ (number >> last_shift)).to(tl.int32, bitcast=True)
    # -v where v < 1/2, else 1 - v: small numbers are precise.
    # log1p(x) = log(u) x / (u - 1) for u = 1 + x: the rounding of u cancels.
    signed = (number.to(tl.float32) + 0.5) * -unit
    shifted = 1.0 + signed
    is_tiny = shifted == 1.0
    low_half = tl.where(is_tiny, signed, tl.log(shifted) * signed / tl.where(is_tiny, 1.0, shifted - 1.0))
    inner = tl.where(signed < 0, low_half, tl.log(tl.where(signed < 0, 1.0, signed)))
    noise = -tl.log(-inner)
    start = row.to(tl.int64) * columns
    logit = tl.load(logits + start + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(scores + start + column, logit + tl.load(scale + row) * noise, mask=inside)
