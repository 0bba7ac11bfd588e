"""The likeliest next tokens of the target, as a draft estimates them: the children of a node of the draft's tree.

The draft ranks by score, logit plus T times the noise, so the first token of a row is the choice of a `RowSampler`.

The probabilities assume that the draft's logits l are off by standard Gumbel noise e. With the shared noise g, the
target takes the argmax of (l + e) / T + g, which has the distribution softmax(l + T g), the softmax of the scores.

The host mixes in tokens of the n-gram cache (`amusd/drafters/ngram.py`): a token of probability q under the softmax of
the logits weighs exp(bias) q^slope if that is more.
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
from amusd.protocol.draft_tree import Guesses
from amusd.sampling.noise import code_of, noise_of, noisy_scores
from amusd.sampling.processors import largest_columns
from amusd.sampling.sampler import RowSampler, SamplingState, SequenceSampler
from amusd.sampling.sampler_inputs import MAX_MIXED, PackedInputs, SamplerInputs

_LEAST_PROBABILITY = 1e-37
"""Least probability: a smaller float32 loses digits."""
_LARGEST = 700.0
"""Largest exponent: exp overflows above 709."""
UNPROPOSED = -2.8
"""Assumed log q of a token that the draft cannot propose."""
Mixture = Sequence[tuple[int, float, float]]
"""Up to `MAX_MIXED` tokens, each with a bias and a slope above 0."""


@dataclass(frozen=True)
class RowRanker(RowSampler):
    """The likeliest columns of each row of logits.

    The outputs of a row:

        columns [n]   the best by their scores
        floats        log of the sum of exp(score), and of exp(logit), over all columns
                      scores [n] of the best columns; logits, then scores, of the mixture's columns
    """

    max_best = 16

    @property
    def num_outputs(self) -> int:
        """See `RowSampler`."""
        return 2 * self.num_best + 2 + 2 * MAX_MIXED

    def compute(self, logits: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
        """See `RowSampler`; the columns are those of the largest logits."""
        return logits.max(1).indices, self.ranks_of(logits.float(), packed)

    def ranks_of(self, logits: Tensor, packed: Tensor) -> Tensor:
        """int32 [rows, num_outputs] of float32 logits, on any device for all rows at once."""
        inputs, shaped = SamplerInputs.of(packed), self.shaped(logits, packed)
        relative = shaped - shaped.amax(1, keepdim=True)  # or large logits would round the noise away
        scores = self._noisy(relative, inputs)
        values, columns = largest_columns(scores, self.num_best)
        total = values[:, :1] - scores.log_softmax(1).amax(1, keepdim=True)
        total_of_logits = total if scores is relative else -relative.log_softmax(1).amax(1, keepdim=True)
        mixed = inputs.mixed.clamp(min=0)
        named = relative.gather(1, mixed), scores.gather(1, mixed)
        numbers = torch.cat((total, total_of_logits, values, *named), 1)
        return torch.cat((columns.int(), numbers.view(torch.int32)), 1)

    def _noisy(self, relative: Tensor, inputs: SamplerInputs) -> Tensor:
        """[rows, columns]: the scores; `relative` itself where a CPU adds no noise."""
        if relative.device.type != "cpu":
            scores: Tensor = noisy_scores(relative, self.state.codes, inputs.key, inputs.temperature)
            return scores
        if not inputs.temperature.any():
            return relative
        noise = torch.stack([self.state.noise_row(key) for key in inputs.key.tolist()])
        return torch.addcmul(relative, noise, inputs.temperature.unsqueeze(1))


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
        """`number`: most tokens of a row; each is likelier than `min_probability`."""
        super().__init__(distribution, state, prompt, sequence=sequence)
        self.sampler: RowRanker = RowRanker(state, self.sampler.level)
        self._number = number
        self._least = max(min_probability, _LEAST_PROBABILITY)

    def inputs_after(
        self, length: int, paths: Sequence[Sequence[int]], mixtures: Sequence[Mixture] = (), num_unranked: int = 0
    ) -> PackedInputs:
        """Inputs of rows, each after the first `length` tokens and a path.

        `mixtures`: known tokens of each row, or empty. `num_unranked`: number of earlier rows.
        """
        packed = self._pack(length, [*((),) * num_unranked, *paths])
        for row, mixture in zip(SamplerInputs.of(packed).mixed[num_unranked:], mixtures, strict=bool(mixtures)):
            row[: len(mixture)] = [max(0, self.state.column_of(token_id)) for token_id, _, _ in mixture]
        return packed

    def rank(
        self,
        logits: Tensor,
        packed: PackedInputs,
        mixtures: Sequence[Mixture] = (),
        outputs: npt.NDArray[np.int32] | None = None,
    ) -> list[Guesses]:
        """The likeliest tokens of each row of `logits` [rows, columns], the best first.

        Each row's largest logit must be finite. Probabilities are above 0 and sum to at most 1. `packed`, `mixtures`:
        see `inputs_after`. `outputs`: of the sampler, if computed in the pass.
        """
        if outputs is None:
            found = self.sampler.ranks_of(logits.float(), self.state.send(torch.from_numpy(packed)))
            outputs = self.state.fetch(found).numpy()
        number = self.sampler.num_best
        token_ids, numbers = self.state.ids[outputs[:, :number]].tolist(), outputs[:, number:].view(np.float32).tolist()
        rows = zip(
            token_ids, numbers, SamplerInputs.of(packed).key.tolist(), mixtures or ((),) * len(packed), strict=True
        )
        return [self._ranked(*row) for row in rows]

    def _ranked(self, token_ids: list[int], numbers: list[float], key: int, mixture: Mixture) -> Guesses:
        total, total_of_logits = numbers[:2]
        logits, noisy = numbers[-2 * MAX_MIXED : -MAX_MIXED], numbers[-MAX_MIXED:]
        scores = {token_id: score for token_id, score in zip(token_ids, numbers[2:], strict=False) if score > -math.inf}
        mass = 1.0  # of `total`
        for (token_id, bias, slope), logit, score in zip(mixture, logits, noisy, strict=False):
            if self.state.column_of(token_id) >= 0 and logit > -math.inf:
                log_q, noise = logit - total_of_logits, score - logit
                weight = max(log_q, bias + slope * log_q)
                mass -= math.exp(score - total)
            else:
                weight, noise = bias + slope * UNPROPOSED, self._noise_of_token(token_id, key)
            scores[token_id] = total_of_logits + weight + noise
            mass += math.exp(min(scores[token_id] - total, _LARGEST))
        total += math.log(max(mass, _LEAST_PROBABILITY))
        ranked = sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))[: self._number]
        weights = [math.exp(min(score - total, 0.0)) for _, score in ranked]
        together = max(1.0, sum(weights))
        pairs = zip(ranked, weights, strict=True)
        return tuple((token_id, weight / together) for (token_id, _), weight in pairs if weight > self._least)

    def _noise_of_token(self, token_id: int, key: int) -> float:
        if not self.distribution.temperature:
            return 0.0
        code = np.array([code_of(token_id)], dtype=np.uint32)
        return self.distribution.temperature * float(noise_of(code, key)[0])
