"""Logits plus Gumbel noise on a device: the noise of `noise.py`, its integers bit for bit, its logarithms in float32.

On a GPU one Triton kernel reads the logits once; elsewhere the same arithmetic is a chain of torch's operators. Both
work on fixed addresses and ask the device for nothing, so that they can be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amusd.sampling.noise import FIRST_FACTOR, LAST_SHIFT, ROUNDS, UNIT


@torch.library.custom_op("amusd::noisy_scores", mutates_args=(), device_types="cpu")
def noisy_scores(logits: Tensor, codes: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
    """[rows, columns] float32: `logits` [rows, columns] plus `scale` [rows] float32 times the noise.

    `codes` [columns] int32: the bits of `noise.codes_of` for the token that each column scores; `keys` [rows, 2] int32:
    the bits of the low and the high half of each row's key.
    """
    return compose_noisy_scores(logits, codes, keys, scale)


@noisy_scores.register_fake
def _(logits: Tensor, codes: Tensor, keys: Tensor, scale: Tensor) -> Tensor:  # noqa: ARG001 - the shape is the logits'
    return torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)


@noisy_scores.register_kernel("cuda")
def _(logits: Tensor, codes: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
    from amusd.sampling.noisy_scores_triton import launch_noisy_scores  # Triton comes with torch's CUDA builds

    with torch.cuda.device(logits.device):  # Triton launches on the current device
        return launch_noisy_scores(logits, codes, keys, scale)


def compose_noisy_scores(logits: Tensor, codes: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
    """`noisy_scores` as a chain of torch's operators."""
    numbers = device_counters(codes, keys)
    # v < 1/2 is a number >= 0 here: log(1 - v) = log1p(-v). Above, 1 - v itself is small, and has the precision.
    signed = numbers.float().add_(0.5).mul_(-UNIT)  # -v, or 1 - v
    inner = torch.where(signed < 0, signed.log1p(), signed.log())
    return torch.addcmul(logits.float(), inner.neg_().log_(), scale.unsqueeze(1), value=-1)


def device_counters(codes: Tensor, keys: Tensor) -> Tensor:
    """[rows, columns] int32: the bits of `noise.counters`. Parameters as of `noisy_scores`."""
    numbers = codes.bitwise_xor(keys[:, :1]).mul_(_signed(FIRST_FACTOR)).add_(keys[:, 1:])
    for shift, factor in ROUNDS:
        numbers.bitwise_xor_(_shifted(numbers, shift)).mul_(_signed(factor))
    return numbers.bitwise_xor_(_shifted(numbers, LAST_SHIFT))


def _shifted(numbers: Tensor, shift: int) -> Tensor:
    """Shift to the right, with zeros from the left: torch's own shift of int32 repeats the sign."""
    return (numbers >> shift).bitwise_and_((1 << (32 - shift)) - 1)


def _signed(bits: int) -> int:
    """32 bits as an int32."""
    return bits - (1 << 32) if bits >> 31 else bits
