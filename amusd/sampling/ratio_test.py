"""The ratio test on logits: the draft's draws with their distributions, and the target's verdicts.

Neither is captured: distributions of candidates are known only after a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.sampling.acceptance import Acceptance, ProbabilityRow, pack_row
from amusd.sampling.noise import Domain, code_of, counters, gumbel, key_of, uniform
from amusd.sampling.noisy_scores import noisy_argmax
from amusd.sampling.processors import floats
from amusd.sampling.sampler import KEY, TEMPERATURE, SequenceSampler, Words

DRAFT_SUPPORT = 1024


class DraftSampler(SequenceSampler):
    """A draft's draws."""

    domain = Domain.DRAFT

    def draw(self, logits: Tensor, words: Words) -> tuple[int, bytes]:
        """The column drawn from `logits` [1, columns], and the row that it was drawn from."""
        inputs = self.state.send(torch.from_numpy(words))
        best = _shaped(self, logits, inputs).topk(min(DRAFT_SUPPORT, logits.shape[1]), 1)
        columns, bits = self.state.fetch(torch.cat((best.indices, best.values.double().view(torch.int64)))).numpy()
        scores, ids = bits.view(np.float64), self.state.ids[columns]
        noise = gumbel(counters(code_of(ids).astype(np.uint32), int(words[0, KEY])))
        weights = np.exp(scores - scores[0])
        probabilities = (weights / weights.sum()).astype(np.float32)
        able = np.flatnonzero(probabilities)
        able = able[np.argsort(ids[able])]
        return int(columns[(scores + noise).argmax()]), pack_row(ProbabilityRow(ids[able], probabilities[able]))


class RatioTest(SequenceSampler):
    """The target's verdicts: a candidate is kept with probability min(1, p / q), see `acceptance.py`."""

    domain = Domain.RESAMPLE

    def accept(
        self, logits: Tensor, start: int, words: Words, judged: Sequence[int], drawn_from: Sequence[ProbabilityRow]
    ) -> Acceptance:
        """The tokens that a pass whose first token is at `start` commits.

        `logits` [rows, columns]; `words`: of `rows`; `judged`: the candidates, one late one included.
        """
        words = np.concatenate((words, self._facts(len(logits), start, judged, drawn_from).view(np.int64)), 1)
        inputs = self.state.send(torch.from_numpy(words))
        at_once = 1 if logits.device.type == "cpu" else len(logits)  # a CPU looks no further than it has to
        token_ids: list[int] = []
        for rows in zip(torch.split(logits, at_once), torch.split(inputs, at_once), strict=True):
            for is_kept, recovered in self.state.fetch(self._verdicts(*rows)).tolist():
                if not is_kept:
                    return Acceptance((*token_ids, recovered), len(token_ids))
                token_ids.append(judged[len(token_ids)])
        return Acceptance(tuple(token_ids), len(token_ids))

    def _facts(
        self, number: int, start: int, judged: Sequence[int], drawn_from: Sequence[ProbabilityRow]
    ) -> npt.NDArray[np.float64]:
        """[rows, 2 + 2 n]: the candidate, the least p that keeps it, and the n tokens and probabilities of q."""
        most = max((len(row.token_ids) for row in drawn_from), default=1)
        facts = np.zeros((number, 2 + 2 * most))
        facts[:, 1] = np.inf  # without a candidate none is kept
        for row, (candidate, q) in enumerate(zip(judged, drawn_from, strict=True)):
            least = uniform(key_of(self.distribution.seed, start + 1 + row, Domain.ACCEPT)) * q.of(candidate)
            facts[row, :2] = candidate, least
            facts[row, 2 : 2 + len(q.token_ids)] = q.token_ids
            facts[row, 2 + most : 2 + most + len(q.token_ids)] = q.probabilities
        return facts

    def _verdicts(self, logits: Tensor, inputs: Tensor) -> Tensor:
        """[rows, 2]: whether each candidate is kept, and the token in its place. `inputs`: words and facts."""
        words, facts = inputs[:, : self.sampler.num_inputs], inputs[:, self.sampler.num_inputs :].view(torch.float64)
        most = facts.shape[1] // 2 - 1
        candidates, least, ids, q_probs = torch.split(facts, [1, 1, most, most], 1)
        p = _shaped(self, logits, words).double().softmax(1)
        is_kept = least < p.gather(1, candidates.long())
        excess = residual(p, ids.long(), q_probs).log().float()
        temperature = torch.ones(len(p), device=p.device)  # which is in p already
        recovered = noisy_argmax(excess, self.state.codes, words[:, KEY], temperature)
        return torch.cat((is_kept.long(), recovered.unsqueeze(1)), 1)


def residual(p: Tensor, ids: Tensor, q_probs: Tensor) -> Tensor:
    """[rows, columns]: the excess of p [rows, columns] over q, not normalised; p itself where both are equal.

    `ids` int64 and `q_probs` [rows, n]: the tokens that could be drawn; 0 for padding.
    """
    left = p.scatter_add(1, ids, -q_probs).clamp_(min=0)
    return torch.where(left.any(1, keepdim=True), left, p)


def _shaped(sampler: SequenceSampler, logits: Tensor, words: Tensor) -> Tensor:
    """float32 [rows, columns]: processed logits, divided by the temperature."""
    return sampler.sampler.shaped(logits.float(), words) / floats(words[:, TEMPERATURE]).unsqueeze(1)
