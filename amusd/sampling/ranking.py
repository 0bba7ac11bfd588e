"""The likeliest next tokens of the target, as a draft sees them: what becomes the children of a node of its tree.

The target's token is the argmax of its scores: processed logits and, under matching, the noise that the draft knows as
well. So the draft ranks by its own scores; the first of a row is the token that a `RowSampler` would choose.

The probabilities are estimates. They would be exact if standard Gumbel noise e were what the draft's logits l are wrong
by: with the noise g that both know, the target takes the argmax of (l + e) / T + g at temperature T, which, given l and
g, is distributed as softmax(l + T g): the softmax of T times the scores. Greedy: the softmax of the logits.

Something else may know some tokens of a row (`amusd/drafters/ngram.py`). A known token that has the probability q under
the softmax of the logits weighs exp(bias) q^slope instead of q, if that is more, and all weights are divided by their
sum. The host mixes them in: it makes known tokens likelier and leaves the others in their order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.config import Distribution
from amusd.protocol.draft_session import Guesses
from amusd.sampling.noise import code_of, counters, gumbel
from amusd.sampling.noisy_scores import noisy_scores
from amusd.sampling.processors import Row, floats, largest_columns, log_sum_exp
from amusd.sampling.sampler import NUM_PLAIN, RowSampler, SamplingState, SequenceSampler, Words, noise_of

MAX_MIXED = 3
"""Tokens of a mixture at most."""
_LEAST_PROBABILITY = 1e-37
"""Below it a float32 loses its digits: such a token counts as one that cannot come."""
_NOT_ASKED = -1
_LARGEST = 700.0
"""An exponent whose exponential is still a number."""

Mixture = Sequence[tuple[int, float, float]]
"""Different tokens, each with a bias and a slope; slopes are above 0."""
NUM_RANKED = 16
"""Columns of a row at most."""
UNPROPOSED = -2.8
"""The logarithm of q for a token that the draft cannot propose. Fitted with the weights of the n-gram cache."""


@dataclass(frozen=True)
class RowRanker(RowSampler):
    """The likeliest columns of each row of logits; plain or shaped. Reads up to `MAX_MIXED` columns to be told of, too.

    What it tells of a row, scores being T times those of matching, and all relative to the largest logit:

        columns [n]   the best by their scores
        floats        log of the sum of exp(score), and of exp(logit), over all columns
                      scores [n] of the best; logits, then scores, of the columns that were asked for
    """

    first_further = NUM_PLAIN + MAX_MIXED

    @property
    def num_ranked(self) -> int:
        """The n of a row."""
        return min(NUM_RANKED, self.state.num_columns)

    @property
    def num_outputs(self) -> int:
        """See `Sampler`."""
        return 2 * self.num_ranked + 2 + 2 * MAX_MIXED

    def of_rows(self, logits: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """See `RowSampler`; the columns are those of the largest logits."""
        asked = inputs[:, NUM_PLAIN : self.first_further].clamp(min=0)
        further = inputs[:, self.first_further :]
        shaped = self.state.shaped(logits, further) if self.level else logits
        relative = shaped - shaped.amax(1, keepdim=True)  # or large logits would round the noise away
        scores = noisy_scores(relative, self.state.codes, inputs[:, :2].int(), floats(inputs[:, 2]))
        best = scores.topk(self.num_ranked, 1)
        total = best.values[:, :1] - scores.log_softmax(1).amax(1, keepdim=True)
        total_of_logits = -relative.log_softmax(1).amax(1, keepdim=True)
        told = (total, total_of_logits, best.values, relative.gather(1, asked), scores.gather(1, asked))
        return logits.max(1).indices, torch.cat((best.indices.int(), torch.cat(told, 1).view(torch.int32)), 1)

    def of_row(self, row: Row, words: Words) -> tuple[int, npt.NDArray[np.int32]]:
        """See `RowSampler`. Noise is made for the columns only that filters leave."""
        shaped, left = self.shaped_row(row, words)
        logits = (shaped if left is None else shaped[left]) - shaped.max()
        scores, key, temperature = logits, words[:2].tolist(), words[2:3].view(np.float64).astype(np.float32)
        if temperature:
            noise = noise_of(self.state, *key) if left is None else gumbel(counters(self.state.bits[left], key))
            scores = (logits + temperature * noise).astype(np.float32, copy=False)
        asked = words[NUM_PLAIN : self.first_further]
        places = asked if left is None else left.searchsorted(asked).clip(max=len(left) - 1)
        is_left = left is None or left[places] == asked
        named = [np.where(is_left, each[places], np.float32(-np.inf)) for each in (logits, scores)]
        places = largest_columns(scores, self.num_ranked)
        columns, best = np.zeros(self.num_ranked, np.int32), np.full(self.num_ranked, -np.inf, np.float32)
        columns[: len(places)], best[: len(places)] = places if left is None else left[places], scores[places]
        total = log_sum_exp(scores)
        totals = total, total if scores is logits or asked.max() == _NOT_ASKED else log_sum_exp(logits)
        told = np.concatenate((totals, best, *named), dtype=np.float32)
        return int(row.argmax()), np.concatenate((columns, told.view(np.int32)))


class Ranking(SequenceSampler):
    """Ranks the next tokens of one sequence by a draft's logits."""

    def __init__(
        self,
        distribution: Distribution,
        state: SamplingState,
        prompt: Sequence[int] = (),
        *,
        number: int,
        min_probability: float = 0.0,
        sequence: int = 0,
    ) -> None:
        """`number`: tokens of each row at most; `min_probability`: only those that are likelier.

        Not for the ratio test, whose target draws with noise of its own.
        """
        super().__init__(distribution, state, prompt, sequence=sequence)
        self.sampler: RowRanker = RowRanker(state, self.sampler.level)
        self._number = number
        self._least = max(min_probability, _LEAST_PROBABILITY)

    def rows_behind(
        self, length: int, paths: Sequence[Sequence[int]], mixtures: Sequence[Mixture] = (), num_unranked: int = 0
    ) -> Words:
        """The words of rows, each behind the first `length` tokens of the sequence and a path of further ones.

        `mixtures`: what is known of each row beside its logits; empty: nothing. `num_unranked`: rows before them.
        """
        words = self._words(length, [*((),) * num_unranked, *paths])
        words[:, NUM_PLAIN : self.sampler.first_further] = _NOT_ASKED
        for row, mixture in zip(words[num_unranked:, NUM_PLAIN:], mixtures, strict=bool(mixtures)):
            for place, (token_id, _, _) in enumerate(mixture):
                row[place] = max(0, self.state.column_of(token_id))
        return words

    def rank(
        self,
        logits: Tensor,
        words: Words,
        mixtures: Sequence[Mixture] = (),
        outputs: npt.NDArray[np.int32] | None = None,
    ) -> list[Guesses]:
        """Return the likeliest tokens of each row of `logits` [rows, columns], the best first.

        The largest logit of each is a finite number. A row has fewer tokens than asked for if filters leave fewer, or
        if the others are less likely than wanted. Probabilities are above 0 and sum to at most 1. `words`, `mixtures`:
        see `rows_behind`. `outputs`: those of the sampler, if the pass has computed them.
        """
        if outputs is None:
            outputs = self.sampler.compute(logits, torch.from_numpy(words).to(logits.device))[1].cpu().numpy()
        return [
            self._ranked(row, key, mixtures[number] if mixtures else ())
            for number, (row, key) in enumerate(zip(outputs, words[:, :2].tolist(), strict=True))
        ]

    def _ranked(self, outputs: npt.NDArray[np.int32], key: Sequence[int], mixture: Mixture) -> Guesses:
        number = self.sampler.num_ranked
        ids, told = (
            [self._token(column) for column in outputs[:number].tolist()],
            outputs[number:].view(np.float32).tolist(),
        )
        total, total_of_logits = told[:2]
        best = zip(ids, told[2 : 2 + number], strict=True)
        scores = {token_id: score for token_id, score in best if score > -math.inf}
        logits, noisy = told[2 + number :][:MAX_MIXED], told[2 + number + MAX_MIXED :]
        mass = 1.0  # of `total`
        for (token_id, bias, slope), own, score in zip(mixture, logits, noisy, strict=False):
            if self.state.column_of(token_id) >= 0 and own > -math.inf:
                mass -= math.exp(score - total)
                log_q, noise = own - total_of_logits, score - own
                weight = max(log_q, bias + slope * log_q)
            else:
                weight, noise = bias + slope * UNPROPOSED, self._noise_of(token_id, key)
            scores[token_id] = total_of_logits + weight + noise
            mass += math.exp(min(scores[token_id] - total, _LARGEST))
        total += math.log(max(mass, _LEAST_PROBABILITY))
        ranked = sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))[: self._number]
        weights = [math.exp(min(score - total, 0.0)) for _, score in ranked]
        together = max(1.0, sum(weights))
        pairs = zip(ranked, weights, strict=True)
        return tuple((token_id, weight / together) for (token_id, _), weight in pairs if weight > self._least)

    def _noise_of(self, token_id: int, key: Sequence[int]) -> float:
        """The noise of one token, times the temperature."""
        if not self.distribution.temperature:
            return 0.0
        code = np.array([code_of(token_id)], dtype=np.uint32)
        return self.distribution.temperature * float(gumbel(counters(code, key))[0])

    def _token(self, column: int) -> int:
        return column if self.state.ids is None else int(self.state.ids[column])
