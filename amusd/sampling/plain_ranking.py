"""The ranking of `ranking.py` where nothing but a temperature shapes the distribution.

Few numbers of each row are needed: the best scores with their columns, and two totals. On a device they are made there.
A mixture makes its own tokens likelier and leaves the others in their order, so the likeliest of a mixed row are among
those of the row and the tokens of the mixture: few numbers are mixed instead of whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.config import Distribution
from amusd.sampling.digest import Digest, Digests, RowDigest, Words
from amusd.sampling.kept_noise import KeptNoise, Noise
from amusd.sampling.noise import Domain, codes_of, gumbel_of, key_of
from amusd.sampling.pass_rows import check_largest
from amusd.sampling.ranking import Mixture, RankedTokens, Ranking, check_rows

_LEAST_PROBABILITY = 1e-37
"""Below it a float32 loses its digits: such a token counts as one that cannot come."""
_LARGEST = 700.0
"""Whose exponential is still a number."""


class AnyRanking(Protocol):
    """Ranks the next tokens of one sequence: `Ranking` or `PlainRanking`."""

    @property
    def needs_contexts(self) -> bool:
        """See `Ranking`."""
        ...

    @property
    def digest(self) -> Digest | None:
        """See `Ranking`."""
        ...

    def inputs(
        self,
        positions: Sequence[int],
        contexts: Sequence[Sequence[int]] = (),
        mixtures: Sequence[Mixture] = (),
    ) -> npt.NDArray[np.int64]:
        """See `Ranking`."""
        ...

    def rank(
        self,
        logits: Tensor,
        positions: Sequence[int],
        contexts: Sequence[Sequence[int]] = (),
        mixtures: Sequence[Mixture] = (),
        outputs: Words | None = None,
    ) -> list[RankedTokens]:
        """See `Ranking`."""
        ...


def make_ranking(
    distribution: Distribution,
    vocab_size: int,
    output_ids: Tensor | None = None,
    *,
    number: int,
    min_probability: float = 0.0,
    num_prompt_tokens: int = 0,
    digests: Digests | None = None,
) -> AnyRanking:
    """The ranking that fits `distribution`. Parameters and errors as of `Ranking`."""
    if _fits(distribution):
        return PlainRanking(
            distribution, vocab_size, output_ids, number=number, min_probability=min_probability, digests=digests
        )
    return Ranking(
        distribution,
        vocab_size,
        output_ids,
        number=number,
        min_probability=min_probability,
        num_prompt_tokens=num_prompt_tokens,
        digests=digests,
    )


@dataclass(frozen=True, slots=True)
class _Best:
    """The best of one row, relative to one of its logits."""

    total: float
    """Logarithm of the sum of the weights, the exponentials of the scores."""
    alone: float
    """The same of the logits, without noise; of use where columns were asked for."""
    scores: list[float]
    """The best ones, not strictly in order."""
    columns: list[int]
    """Theirs."""
    logits: list[float]
    """Of the columns that were asked for."""
    noises: list[float]
    """Theirs."""


class PlainRanking:
    """Ranks the next tokens of one sequence by a draft's logits, on any device.

    Of equal tokens that of the first column comes first, unless more are equal than are asked for.
    """

    needs_contexts = False

    def __init__(
        self,
        distribution: Distribution,
        vocab_size: int,
        output_ids: Tensor | None = None,
        *,
        number: int,
        min_probability: float = 0.0,
        digests: Digests | None = None,
    ) -> None:
        """Parameters as of `Ranking`. Raises `ValueError` where more than a temperature shapes the distribution."""
        if not _fits(distribution):
            raise ValueError(f"more than a temperature shapes this distribution: {distribution}")
        if number < 1:
            raise ValueError(f"number={number} must be at least 1")
        self._number = min(number, vocab_size)
        self._least = max(min_probability, _LEAST_PROBABILITY)
        self._vocab_size = vocab_size
        self._ids: list[int] | None = None if output_ids is None else output_ids.tolist()
        self._column_of: dict[int, int] | None = None
        self._temperature = distribution.temperature
        self._seed = distribution.seed
        self._noise: KeptNoise | None = None
        self._output_ids = output_ids
        self._digests = digests

    @property
    def digest(self) -> Digest | None:
        """See `Ranking`."""
        return None if self._digests is None else self._digests.few

    def inputs(
        self,
        positions: Sequence[int],
        contexts: Sequence[Sequence[int]] = (),  # noqa: ARG002 - only penalties look at them
        mixtures: Sequence[Mixture] = (),
    ) -> npt.NDArray[np.int64]:
        """See `Ranking`."""
        assert self.digest is not None
        keys = [key_of(self._seed, position, Domain.MATCHING) for position in positions]
        asked = [[self._column(token_id) or 0 for token_id, _ in mixture] for mixture in mixtures]
        return self.digest.inputs(keys, scale=self._temperature, asked=asked)

    def rank(
        self,
        logits: Tensor,
        positions: Sequence[int],
        contexts: Sequence[Sequence[int]] = (),  # noqa: ARG002 - only penalties look at them
        mixtures: Sequence[Mixture] = (),
        outputs: Words | None = None,
    ) -> list[RankedTokens]:
        """See `Ranking`."""
        check_rows(len(logits), positions, None, mixtures)
        mixed = [[(self._column(token_id), token_id, share) for token_id, share in mixture] for mixture in mixtures]
        if self._digests is None and logits.device.type != "cpu":
            self._digests = Digests(self._vocab_size, self._output_ids, logits.device, num_best=self._number)
        if outputs is None and self.digest is not None:
            outputs = self.digest.outputs(logits, self.inputs(positions, (), mixtures))
        if outputs is not None and self.digest is not None:
            found = [self._from_digest(self.digest.read(row)) for row in outputs]
        else:
            looked_at = [[column or 0 for column, _, _ in row] for row in mixed] or [[]] * len(logits)
            with torch.inference_mode():
                found = self._find(logits.float(), self._noise_at(positions), looked_at)
        rows = zip(found, mixed or [[]] * len(logits), positions, strict=True)
        return [self._rank(best, row, position) for best, row, position in rows]

    def _find(self, logits: Tensor, noise: Sequence[Noise], looked_at: Sequence[list[int]]) -> list[_Best]:
        """Row by row: there are few passes over it, and it stays in the processor's cache."""
        found = []
        for index, (row, columns) in enumerate(zip(logits.numpy(), looked_at, strict=True)):
            largest = row[row.argmax()]
            check_largest(largest)
            relative = row - largest  # or large logits would round the noise away
            if noise:
                row_noise = noise[index]
                scores = relative + row_noise
                top = scores[scores.argmax()]
                weights = np.exp(scores - top)
                alone = float(np.exp(relative).sum()) if columns else 1.0
                total = float(weights.sum())
            else:
                row_noise, scores, top = None, relative, np.float32(0)
                weights = np.exp(relative)
                alone = total = float(weights.sum())
            likely = np.flatnonzero(weights > self._least * total)
            best = likely[np.argsort(-scores[likely], kind="stable")[: self._number]]
            found.append(
                _Best(
                    total=float(top) + math.log(total),
                    alone=math.log(alone),
                    scores=scores[best].tolist(),
                    columns=best.tolist(),
                    logits=relative[columns].tolist() if columns else [],
                    noises=[0.0] * len(columns) if row_noise is None else row_noise[columns].tolist(),
                )
            )
        return found

    def _from_digest(self, digest: RowDigest) -> _Best:
        """Relative to the winner's logit."""
        check_largest(digest.winner_logit)
        own = float(digest.winner_logit)
        place = int(digest.best_scores.argmax())
        order = np.lexsort((digest.best, -digest.best_scores))[: self._number]
        return _Best(
            total=float(digest.best_scores[place]) - own - digest.log_share,
            alone=-digest.log_probability,
            scores=(digest.best_scores[order] - digest.winner_logit).tolist(),
            columns=digest.best[order].tolist(),
            logits=(digest.asked_logits - digest.winner_logit).tolist(),
            noises=(digest.asked_scores - digest.asked_logits).tolist(),
        )

    def _rank(self, found: _Best, mixture: Sequence[tuple[int | None, int, float]], position: int) -> RankedTokens:
        """`mixture`: column (None: the draft has none), token id and share of each."""
        ids, total = self._ids, found.total
        best = [
            (score, column, column if ids is None else ids[column])
            for score, column in zip(found.scores, found.columns, strict=True)
        ]
        if not mixture:
            return self._ranked(best, total)
        rest, mass = 1 - sum(share for _, _, share in mixture), 1.0  # the mass is of `total`
        mixed: dict[int, tuple[float, int, int]] = {}
        for place, (column, token_id, share) in enumerate(mixture):
            # Up to what the model has left, log(rest), which no ranking and no softmax notices.
            logit = math.log(share / rest) + found.alone
            if column is None:
                noise = self._noise_of(token_id, position)
            else:
                own, noise = found.logits[place], found.noises[place]
                mass -= math.exp(own + noise - total)
                logit = _log_add(own, logit)
            score = logit + noise
            mass += math.exp(min(score - total, _LARGEST))
            mixed[token_id] = (score, self._vocab_size + place if column is None else column, token_id)
        others = [one for one in best if one[2] not in mixed]
        return self._ranked([*mixed.values(), *others], total + math.log(mass))

    def _ranked(self, candidates: list[tuple[float, int, int]], total: float) -> RankedTokens:
        """`candidates`: score, column and token id; `total`: the logarithm of the sum of all weights."""
        candidates.sort(key=lambda one: (-one[0], one[1]))
        weights = [math.exp(score - total) for score, _, _ in candidates[: self._number]]
        together = max(1.0, sum(weights))
        likely = [weight / together for weight in weights if weight > self._least]
        return RankedTokens(tuple(token_id for _, _, token_id in candidates[: len(likely)]), tuple(likely))

    def _noise_at(self, positions: Sequence[int]) -> list[Noise]:
        """[columns] for each row, times the temperature; none where none is added."""
        if self._temperature == 0:
            return []
        if self._noise is None:
            codes = codes_of(self._vocab_size if self._ids is None else max(self._ids) + 1)
            own = codes if self._ids is None else codes[self._ids]
            self._noise = KeptNoise(self._seed, own, self._temperature)
        return self._noise.at(positions)

    def _noise_of(self, token_id: int, position: int) -> float:
        if self._temperature == 0:
            return 0.0
        return self._temperature * gumbel_of(token_id, key_of(self._seed, position, Domain.MATCHING))

    def _column(self, token_id: int) -> int | None:
        if self._ids is None:
            return token_id if token_id < self._vocab_size else None
        if self._column_of is None:
            self._column_of = {own: column for column, own in enumerate(self._ids)}
        return self._column_of.get(token_id)


def _fits(distribution: Distribution) -> bool:
    return distribution.is_plain and distribution.rule != "rejection"


def _log_add(first: float, second: float) -> float:
    """log(exp(first) + exp(second)); `second` is finite."""
    larger, smaller = max(first, second), min(first, second)
    return larger + math.log1p(math.exp(smaller - larger))
