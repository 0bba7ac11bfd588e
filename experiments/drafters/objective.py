"""Cross entropy of a drafter to its target, over the drafter's vocabulary.

Logits and gradients are computed for a block of tokens at a time, since those of a batch need gigabytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BLOCK = 512


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, targets: Tensor, head: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        gradients = torch.empty_like(states, dtype=torch.float32)
        with torch.autocast(states.device.type, enabled=False):
            for start in range(0, len(states), _BLOCK):
                block = slice(start, start + _BLOCK)
                logits = (states[block].to(head.dtype) @ head.t()).float()
                total += logits.logsumexp(dim=-1).sum() - torch.linalg.vecdot(targets[block], logits).sum()
                gradients[block] = (logits.softmax(dim=-1).sub_(targets[block])).to(head.dtype) @ head
        ctx.save_for_backward(gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        (gradients,) = ctx.saved_tensors
        return gradients * outer[0], None, None


def cross_entropy(states: Tensor, targets: Tensor, head: Tensor) -> Tensor:
    """Sum over tokens of -p log q, `targets` p float32 [tokens, ids], q from `states` [tokens, hidden] by `head`."""
    result: Tensor = _CrossEntropy.apply(states, targets, head)
    return result


@torch.no_grad()
def distributions(states: Tensor, head: Tensor) -> Tensor:
    """float32 [tokens, ids]: the target's distribution over the rows of `head`."""
    parts = [(block @ head.t()).float().softmax(dim=-1) for block in states.split(_BLOCK)]
    return torch.cat(parts)
