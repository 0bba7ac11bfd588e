"""How far the draft's distribution of the next token is from the target's, over the draft's vocabulary.

With p the target's and q the draft's distribution, both over the tokens that the draft can propose: the
Kullback-Leibler divergence sum p log(p / q), the total variation sum |p - q| / 2 (1 minus the chance that a sampled
candidate is accepted), or a weighted sum of both. Logits of a whole batch would need gigabytes, so they are made for a
block of tokens at a time, and the gradient with respect to the states in the same visit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BLOCK = 512
"""Tokens whose logits are held at once."""


class _Divergence(torch.autograd.Function):
    """Sum over tokens of `(1 - tv_weight) * KL + tv_weight * TV`."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, teacher_states: Tensor, head: Tensor, tv_weight: float) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        gradients = torch.empty_like(states, dtype=torch.float32)
        with torch.autocast(states.device.type, enabled=False):
            for start in range(0, len(states), _BLOCK):
                block = slice(start, start + _BLOCK)
                logits = states[block].to(head.dtype) @ head.t()
                teacher_logits = teacher_states[block] @ head.t()
                q = logits.softmax(dim=-1, dtype=torch.float32)
                p = teacher_logits.softmax(dim=-1, dtype=torch.float32)
                total += (1 - tv_weight) * _kl(p, teacher_logits.float(), logits.float())
                if tv_weight == 0:
                    gradient = q.sub_(p)
                else:
                    difference = q - p
                    total += tv_weight * difference.abs().sum() / 2
                    sign = difference.sign()
                    inner = (q * sign).sum(dim=-1, keepdim=True)
                    gradient = difference.mul_(1 - tv_weight).add_(q * (sign - inner), alpha=tv_weight / 2)
                gradients[block] = gradient.to(head.dtype) @ head
        ctx.save_for_backward(gradients)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None]:
        (gradients,) = ctx.saved_tensors
        return gradients * outer[0], None, None, None


def _kl(p: Tensor, teacher_logits: Tensor, logits: Tensor) -> Tensor:
    """Sum over rows of sum p log(p / q), from p and both logits [rows, vocabulary]."""
    cross = torch.linalg.vecdot(p, teacher_logits - logits)
    return (cross - teacher_logits.logsumexp(dim=-1) + logits.logsumexp(dim=-1)).sum()


def divergence(states: Tensor, teacher_states: Tensor, head: Tensor, *, tv_weight: float = 0.0) -> Tensor:
    """Sum over the tokens; both states are [tokens, hidden], `head` is [vocabulary, hidden]."""
    result: Tensor = _Divergence.apply(states, teacher_states, head, tv_weight)
    return result


@torch.no_grad()
def agreement(states: Tensor, teacher_states: Tensor, head: Tensor, output_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Per token: whether the draft's best token is the target's, and the sampled acceptance, 1 - total variation.

    `head` is the target's whole head here [all ids, hidden]; the draft's vocabulary is its rows `output_ids`.
    """
    greedy, sampled = [], []
    for start in range(0, len(states), _BLOCK):
        block = slice(start, start + _BLOCK)
        logits = (teacher_states[block] @ head.t()).float()
        best = logits.argmax(dim=-1)
        p = logits.softmax(dim=-1)[:, output_ids]
        q = (states[block].to(head.dtype) @ head[output_ids].t()).float().softmax(dim=-1)
        greedy.append(output_ids[q.argmax(dim=-1)] == best)
        sampled.append(torch.minimum(p, q).sum(dim=-1))
    return torch.cat(greedy), torch.cat(sampled)
