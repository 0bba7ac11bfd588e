"""How far a drafter's distribution of the next token is from the target's, over the drafter's vocabulary.

The logits of a whole batch would need gigabytes, so they are made for a block of tokens at a time, and the gradient
with respect to the states in the same visit. The target's distribution is computed once for all distances.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BLOCK = 512
"""Tokens whose logits are held at once."""


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


@torch.no_grad()
def verdicts(states: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """The target's best token and the logarithm of its normaliser at every state, over its whole vocabulary."""
    best, normaliser = [], []
    for block in states.split(_BLOCK):
        logits = (block @ head.t()).float()
        best.append(logits.argmax(dim=-1))
        normaliser.append(logits.logsumexp(dim=-1))
    return torch.cat(best), torch.cat(normaliser)


@torch.no_grad()
def agreement(
    states: Tensor, teacher_states: Tensor, head: Tensor, output_ids: Tensor, verdict: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Per token: whether the drafter's best token is the target's, and the sampled acceptance, 1 - total variation.

    `head` has the rows `output_ids` of the target's head; `verdict` is what `verdicts` says of `teacher_states`.
    """
    greedy, sampled = [], []
    for start in range(0, len(states), _BLOCK):
        block = slice(start, start + _BLOCK)
        q = (states[block].to(head.dtype) @ head.t()).float().softmax(dim=-1)
        p = ((teacher_states[block] @ head.t()).float() - verdict[1][block].unsqueeze(-1)).exp()
        greedy.append(output_ids[q.argmax(dim=-1)] == verdict[0][block])
        sampled.append(torch.minimum(p, q).sum(dim=-1))
    return torch.cat(greedy), torch.cat(sampled)
