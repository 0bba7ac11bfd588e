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
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.config import Distribution
from amusd.errors import NotFiniteError
from amusd.protocol.draft_session import Guesses
from amusd.sampling.noise import code_of, counters, counters_on_host, gumbel, gumbel_on_host
from amusd.sampling.noisy_scores import Row, noisy_scores
from amusd.sampling.processors import floats
from amusd.sampling.sampler import NUM_PLAIN, Level, RowSampler, SamplingState, SequenceSampler, Words

MAX_MIXED = 3
"""Tokens of a mixture at most."""
_LEAST_PROBABILITY = 1e-37
"""Below it a float32 loses its digits: such a token counts as one that cannot come."""
_LARGEST = 700.0
"""An exponent whose exponential is still a number."""
_POSITIONS_KEPT = 16
"""Positions whose noise a CPU keeps: the nodes of a tree stand at few, and meet each of them often."""

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

    first_shaped = NUM_PLAIN + MAX_MIXED
    _noise: OrderedDict[tuple[int, ...], Tensor] = field(default_factory=OrderedDict, compare=False)

    @property
    def num_ranked(self) -> int:
        """The n of a row."""
        return min(NUM_RANKED, self.state.num_columns)

    @property
    def num_outputs(self) -> int:
        """See `Sampler`."""
        return 2 * self.num_ranked + 2 + 2 * MAX_MIXED

    def compute(self, logits: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, columns] and int64 [rows, num_inputs] -> the largest logits' columns, int32 [rows, num_outputs]."""
        keys, temperature, asked = (
            inputs[:, :2].int(),
            floats(inputs[:, 2:NUM_PLAIN]),
            inputs[:, NUM_PLAIN : NUM_PLAIN + MAX_MIXED],
        )
        exact = logits.float()
        is_on_host = exact.device.type == "cpu"  # where numpy finds it in a tenth of the time
        largest = torch.from_numpy(exact.numpy().argmax(1)) if is_on_host else exact.max(1).indices
        relative = exact - exact.gather(1, largest.unsqueeze(1))  # or large logits would round the noise away
        if self.level is not Level.PLAIN:
            words = inputs[:, self.first_shaped :]
            relative = self.state.shaped(relative, words)
            if is_on_host and self.state.has_filters(words):
                rows = zip(relative.numpy(), keys.tolist(), temperature.tolist(), asked.numpy(), strict=True)
                outputs = [self._outputs_on_host(row, key, factor, places) for row, key, [factor], places in rows]
                return largest, torch.from_numpy(np.stack(outputs))
        scores = self._scores(relative, keys, temperature)
        best = scores.topk(self.num_ranked, 1)
        totals = scores.logsumexp(1, keepdim=True), relative.logsumexp(1, keepdim=True)
        told = torch.cat((*totals, best.values, relative.gather(1, asked), scores.gather(1, asked)), 1)
        return largest, torch.cat((best.indices.int(), told.view(torch.int32)), 1)

    def _outputs_on_host(
        self, row: Row, key: Sequence[int], temperature: float, asked: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32]:
        """The outputs of one row of which filters have left a few columns: noise is made for these alone."""
        left = np.union1d(np.flatnonzero(row > -np.inf), asked)
        logits, codes = row[left], self.state.codes.numpy().view(np.uint32)[left]
        noise = gumbel_on_host(counters_on_host(codes, key))
        scores = (logits + temperature * noise).astype(np.float32)
        order = np.argsort(-scores, kind="stable")[: self.num_ranked]
        columns, best = np.zeros(self.num_ranked, np.int32), np.full(self.num_ranked, -np.inf, np.float32)
        columns[: len(order)], best[: len(order)] = left[order], scores[order]
        places = np.searchsorted(left, asked)
        totals = [np.log(np.exp(each - each.max()).sum()) + each.max() for each in (scores, logits)]
        told = np.concatenate((totals, best, logits[places], scores[places])).astype(np.float32)
        return np.concatenate((columns, told.view(np.int32)))

    def _scores(self, logits: Tensor, keys: Tensor, temperature: Tensor) -> Tensor:
        """[rows, columns]: with noise, which a CPU makes once for each key."""
        if logits.device.type != "cpu":
            scores: Tensor = noisy_scores(logits, self.state.codes, keys, temperature.squeeze(1))
            return scores
        if not temperature.any():
            return logits
        noise = [self._kept(key) for key in torch.split(keys, 1)]
        return torch.addcmul(logits, torch.stack(noise), temperature)

    def _kept(self, key: Tensor) -> Tensor:
        """The noise [columns] under a key [1, 2]."""
        name = tuple(key[0].tolist())
        if name not in self._noise:
            self._noise[name] = gumbel(counters(self.state.codes, key))[0]
            if len(self._noise) > _POSITIONS_KEPT:
                self._noise.popitem(last=False)
        self._noise.move_to_end(name)
        return self._noise[name]


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

        Raises `ValueError` under the ratio test, whose target draws with noise of its own: nothing can be ranked.
        """
        if distribution.rule == "rejection":
            raise ValueError("under the ratio test the target's tokens cannot be ranked")
        if number < 1:
            raise ValueError(f"number={number} must be at least 1")
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

        A row has fewer tokens than asked for if filters leave fewer, or if the others are less likely than wanted.
        Probabilities are above 0 and sum to at most 1. `words`, `mixtures`: see `rows_behind`. `outputs`: those of the
        sampler, if the pass has computed them; otherwise raises `NotFiniteError` if the largest logit of a row is NaN
        or infinite.
        """
        if outputs is None:
            columns, found = self.sampler.compute(logits, torch.from_numpy(words).to(logits.device))
            largest = logits.gather(1, columns.unsqueeze(1)).float().cpu().numpy()
            if not np.isfinite(largest).all():
                raise NotFiniteError(f"the largest logit is {largest[~np.isfinite(largest)][0]}")
            outputs = found.cpu().numpy()
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
        return self.distribution.temperature * float(gumbel_on_host(counters_on_host(code, key))[0])

    def _token(self, column: int) -> int:
        return column if self.state.ids is None else int(self.state.ids[column])
