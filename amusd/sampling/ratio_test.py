"""The ratio test on logits: the draft's draws with what they were drawn from, and the target's verdicts on them.

Neither is captured, since what candidates were drawn from is known only when a pass is over: a batch of operators
behind it, and one more copy and wait on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from amusd.sampling.acceptance import Acceptance, ProbabilityRow, pack_row
from amusd.sampling.noise import Domain, code_of, counters, gumbel, key_of, uniform
from amusd.sampling.noisy_scores import noisy_argmax
from amusd.sampling.processors import floats, only
from amusd.sampling.sampler import NUM_PLAIN, SequenceSampler, Words

DRAFT_SUPPORT = 1024
"""Tokens that a draft draws from at most: what its rows carry."""


class _RatioSampler(SequenceSampler):
    """What both sides do."""

    draws = True

    def _shaped(self, logits: Tensor, inputs: Tensor) -> Tensor:
        """float32 [rows, columns]: processed logits, divided by the temperature. `inputs`: words, where logits are."""
        shaped = logits.float()
        if self.sampler.level and shaped.device.type == "cpu":
            rows = zip(shaped.numpy(), inputs.numpy(), strict=True)
            shaped = torch.from_numpy(np.stack([only(*self.sampler.shaped_row(*row)) for row in rows]))
        elif self.sampler.level:
            shaped = self.state.shaped(shaped, inputs[:, NUM_PLAIN:])
        return shaped / floats(inputs[:, 2:NUM_PLAIN])


class DraftSampler(_RatioSampler):
    """A draft's draws: each leaves the row that it was drawn from."""

    domain = Domain.DRAFT
    _rows: tuple[bytes, ...] = ()

    def take_rows(self) -> tuple[bytes, ...]:
        """The rows of what was drawn since they were taken last."""
        rows, self._rows = self._rows, ()
        return rows

    def draw(self, logits: Tensor, words: Words) -> int:
        """The column drawn from `logits` [1, columns]."""
        inputs = self.state.send(torch.from_numpy(words))
        best = self._shaped(logits, inputs).topk(min(DRAFT_SUPPORT, logits.shape[1]), 1)
        columns, bits = torch.cat((best.indices, best.values.double().view(torch.int64))).cpu().numpy()
        scores, ids = bits.view(np.float64), columns if self.state.ids is None else self.state.ids.numpy()[columns]
        noise = gumbel(counters(code_of(ids).astype(np.uint32), words[0, :2].tolist()))
        weights = np.exp(scores - scores[0])
        probabilities = (weights / weights.sum()).astype(np.float32)
        able = np.flatnonzero(probabilities)
        able = able[np.argsort(ids[able])]
        self._rows += (pack_row(ProbabilityRow(ids[able], probabilities[able])),)
        return int(columns[(scores + noise).argmax()])


class RatioTest(_RatioSampler):
    """The target's verdicts: a candidate is kept with probability min(1, p / q), see `acceptance.py`."""

    domain = Domain.RESAMPLE

    def accept(
        self, logits: Tensor, start: int, words: Words, judged: Sequence[int], drawn_from: Sequence[ProbabilityRow]
    ) -> Acceptance:
        """The tokens that a pass whose first token stands at `start` commits.

        `logits` [rows, columns]; `words`: of `rows`; `judged`: candidates, with or without one behind those of the
        pass; `drawn_from`: the row of each.
        """
        number = len(logits)
        at_once = 1 if logits.device.type == "cpu" else number
        token_ids: list[int] = []
        for first in range(0, number, at_once):
            rows = slice(first, first + at_once)
            for is_kept, recovered in self._verdicts(
                logits[rows], start + first, words[rows], judged[rows], drawn_from[rows]
            ):
                if not is_kept:
                    return Acceptance((*token_ids, recovered), len(token_ids))
                token_ids.append(judged[len(token_ids)])
        return Acceptance(tuple(token_ids), len(token_ids))

    def _verdicts(
        self, logits: Tensor, start: int, words: Words, judged: Sequence[int], drawn_from: Sequence[ProbabilityRow]
    ) -> list[tuple[bool, int]]:
        """For each row whether its candidate is kept, and the token in its place; without a candidate the latter."""
        most = max((len(row.token_ids) for row in drawn_from), default=1)
        facts = np.zeros((len(logits), 2 + 2 * most))  # the candidate, its uniform number, and what it was drawn from
        facts[:, 0] = -1
        for row, (candidate, q) in enumerate(zip(judged, drawn_from, strict=True)):
            key = key_of(self.distribution.seed, start + 1 + row, Domain.ACCEPT)
            facts[row, :2] = candidate, uniform(key)
            facts[row, 2 : 2 + len(q.token_ids)] = q.token_ids
            facts[row, 2 + most : 2 + most + len(q.token_ids)] = q.probabilities
        sent = self.state.send(torch.from_numpy(np.concatenate((words, facts.view(np.int64)), 1)))
        inputs = sent[:, : words.shape[1]]
        candidates, uniforms, ids, q_probs = torch.split(
            sent[:, words.shape[1] :].view(torch.float64), [1, 1, most, most], 1
        )
        p, ids = self._shaped(logits, inputs).double().softmax(1), ids.long()
        p_drawn = p.gather(1, candidates.clamp(min=0).long())
        q_drawn = (q_probs * (ids == candidates)).sum(1, keepdim=True)
        is_kept = (candidates >= 0) & (uniforms * q_drawn < p_drawn)
        recovered = self._drawn(residual(p, ids, q_probs), inputs)
        found = torch.cat((is_kept.long(), recovered.unsqueeze(1)), 1).tolist()
        return [(bool(kept), column) for kept, column in found]

    def _drawn(self, weights: Tensor, inputs: Tensor) -> Tensor:
        """[rows]: a column drawn from the weights [rows, columns] of each row."""
        ones = torch.ones(len(weights), device=weights.device)
        return noisy_argmax(weights.log().float(), self.state.codes, inputs[:, :2].int(), ones)


def residual(p: Tensor, ids: Tensor, q_probs: Tensor) -> Tensor:
    """[rows, columns]: what p has more than q, not normalised; p itself where that is nothing (then both are equal).

    `p` [rows, columns]; `ids` int64 and `q_probs` [rows, n]: the tokens that could be drawn; 0 for padding.
    """
    left = p.scatter_add(1, ids, -q_probs).clamp_(min=0)
    return torch.where(left.any(1, keepdim=True), left, p)
