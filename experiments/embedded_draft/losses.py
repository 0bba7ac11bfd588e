"""Training losses. The embedded draft's is -log(alpha); alpha = sum min(p, m) is the acceptance rate at temperature 1.

p is the target's distribution over the draft's vocabulary, q the draft's, and m is q mixed with the n-gram cache
(`amusd/sampling/ranking.py`). Dividing by alpha keeps gradients from vanishing where little is accepted. The loss of
other drafters is the cross entropy to the target. Logits and gradients are computed for a block of tokens at a time,
since a whole batch needs gigabytes.

References: LK losses, arXiv 2602.23881.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amusd.sampling.ranking import UNPROPOSED

_BLOCK = 512
_LEAST_ACCEPTANCE = 1e-3


BlockLoss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`loss_of_block`, compiled or not."""


def loss_of_block(
    student_logits: Tensor, teacher_logits: Tensor, columns: Tensor, biases: Tensor, slopes: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum over the tokens of -log(alpha), and its gradient with respect to the student's logits, in their dtype.

    Both logits are [tokens, vocabulary]; the others are those of `negative_log_acceptance`.
    """
    log_q = student_logits.log_softmax(dim=-1, dtype=torch.float32)
    p = teacher_logits.softmax(dim=-1, dtype=torch.float32)
    q = log_q.exp()
    places, is_proposed = columns.clamp_min(0), columns >= 0
    own = torch.where(is_proposed, log_q.gather(1, places), -torch.inf)
    log_weights = mixed_log_weights(own, biases, slopes)
    lifted = log_weights.exp() - own.exp()
    total = 1 + lifted.sum(dim=-1, keepdim=True)
    mixed = q.scatter_add(1, places, lifted * is_proposed) / total
    alpha = torch.minimum(p, mixed).sum(dim=-1, keepdim=True).clamp_min(_LEAST_ACCEPTANCE)
    too_low = mixed * (mixed < p)  # alpha grows with these tokens' probability alone
    pull = too_low - mixed * too_low.sum(dim=-1, keepdim=True)  # d alpha / d log(weight)
    is_lifted = is_proposed & (log_weights > own)
    pull = pull.scatter_add(1, places, pull.gather(1, places) * (slopes - 1) * is_lifted)  # d alpha / d log(q)
    gradient = (q * pull.sum(dim=-1, keepdim=True) - pull) / alpha
    return -alpha.log().sum(), gradient.to(student_logits.dtype)


def mixed_log_weights(log_q: Tensor, biases: Tensor, slopes: Tensor) -> Tensor:
    """What known tokens weigh in a mixture, as `amusd/sampling/ranking.py` has it; all three are [tokens, known].

    `log_q`: minus infinity for tokens that the draft cannot propose. `biases`: minus infinity where nothing is known.
    """
    return torch.maximum(log_q, biases + slopes * torch.where(log_q.isneginf(), UNPROPOSED, log_q))


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, block_loss: Callable[..., Any], *others: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=states.device)
        gradients = torch.empty_like(states, dtype=torch.float32)
        with torch.autocast(states.device.type, enabled=False):
            for start in range(0, len(states), _BLOCK):
                block = slice(start, start + _BLOCK)
                logits = states[block].to(head.dtype) @ head.t()
                loss, gradient = block_loss(logits, *(each[block] for each in others))
                total += loss
                gradients[block] = gradient.to(head.dtype) @ head
        ctx.save_for_backward(gradients)
        ctx.num_others = len(others)
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (gradients,) = ctx.saved_tensors
        return gradients * outer[0], None, None, *[None] * ctx.num_others


def negative_log_acceptance(
    states: Tensor,
    teacher_states: Tensor,
    head: Tensor,
    columns: Tensor,
    biases: Tensor,
    slopes: Tensor,
    block_loss: BlockLoss = loss_of_block,
) -> Tensor:
    """Sum over the tokens; both states are [tokens, hidden], `head` is [vocabulary, hidden].

    `columns`, `biases`, `slopes` [tokens, continuations]: rows of `head` whose tokens the n-gram cache knows, all
    different (-1: one that the draft cannot propose), and what it says of them; with a bias of minus infinity nothing
    is known, and the column may be any.
    """

    def of_block(logits: Tensor, teacher: Tensor, *known: Tensor) -> tuple[Tensor, Tensor]:
        return block_loss(logits, teacher.to(head.dtype) @ head.t(), *known)

    result: Tensor = _Blockwise.apply(states, head, of_block, teacher_states, columns, biases, slopes)
    return result


def cross_entropy(states: Tensor, targets: Tensor, head: Tensor) -> Tensor:
    """Sum over tokens of -p log q, `targets` p float32 [tokens, ids], q from `states` [tokens, hidden] by `head`."""

    def of_block(logits: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.float()
        loss = logits.logsumexp(dim=-1).sum() - torch.linalg.vecdot(p, logits).sum()
        return loss, logits.softmax(dim=-1).sub_(p)

    result: Tensor = _Blockwise.apply(states, head, of_block, targets)
    return result


@torch.no_grad()
def distributions(states: Tensor, head: Tensor) -> Tensor:
    """float32 [tokens, ids]: the target's distribution over the rows of `head`."""
    return torch.cat([(block @ head.t()).float().softmax(dim=-1) for block in states.split(_BLOCK)])


def mix(q: Tensor, output_ids: Tensor, known_ids: Tensor, biases: Tensor, slopes: Tensor, num_ids: int) -> Tensor:
    """[tokens, all ids]: what is drafted from, of `q` [tokens, the draft's ids]; the others as of `agreement`."""
    mixed = torch.zeros((len(q), num_ids), dtype=q.dtype, device=q.device)
    mixed[:, output_ids] = q
    own = mixed.gather(1, known_ids)
    mixed.scatter_add_(1, known_ids, mixed_log_weights(own.log(), biases, slopes).exp() - own)
    return mixed.div_(mixed.sum(dim=-1, keepdim=True))


@torch.no_grad()
def agreement(
    states: Tensor,
    teacher_states: Tensor,
    head: Tensor,
    output_ids: Tensor,
    known_ids: Tensor,
    biases: Tensor,
    slopes: Tensor,
) -> tuple[Tensor, Tensor]:
    """Per token: whether the mixture's best token is the target's, and the sampled acceptance, 1 - total variation.

    `head` is the target's whole head here [all ids, hidden]; the draft's vocabulary is its rows `output_ids`; the
    n-gram cache says `biases` and `slopes` of `known_ids` [tokens, continuations].
    """
    greedy, sampled = [], []
    for start in range(0, len(states), _BLOCK):
        block = slice(start, start + _BLOCK)
        p = (teacher_states[block].to(head.dtype) @ head.t()).float().softmax(dim=-1)
        q = (states[block].to(head.dtype) @ head[output_ids].t()).float().softmax(dim=-1)
        mixed = mix(q, output_ids, known_ids[block], biases[block], slopes[block], len(head))
        greedy.append(mixed.argmax(dim=-1) == p.argmax(dim=-1))
        sampled.append(torch.minimum(p, mixed).sum(dim=-1))
    return torch.cat(greedy), torch.cat(sampled)
