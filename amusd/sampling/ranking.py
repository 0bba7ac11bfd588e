"""The likeliest next tokens of the target, as a draft sees them: what becomes the children of a node of its tree.

The target's token is the argmax of its scores: processed logits and, under matching, the noise that the draft knows as
well. So the draft ranks by its own scores; the first of a row is the token that `TokenSampler` would choose. Scores are
summed in float32, there in float64: they may differ where two tokens tie to rounding.

The probabilities are estimates. They would be exact if standard Gumbel noise e were what the draft's logits l are wrong
by: with the noise g that both know, the target takes the argmax of (l + e) / T + g at temperature T, which, given l and
g, is distributed as softmax(l + T g): the softmax of T times the scores. Greedy: the softmax of the logits.

Something else may know some tokens of a row (`amusd/drafters/ngram.py`). A known token that has the probability q under
the softmax of the logits weighs exp(bias) q^slope instead of q, if that is more, and all weights are divided by their
sum. A token that the draft cannot propose gets a column of its own, behind those of the model.

Where nothing but a temperature shapes the distribution, a few numbers of a row are enough: the best scores and two
totals. A mixture makes its own tokens likelier and leaves the others in their order, so the best of a mixed row are
among those of the row and the tokens of the mixture. Filters and penalties see the mixed row itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt
from torch import Tensor

from amusd.config import Distribution
from amusd.protocol.draft_session import Guesses
from amusd.sampling.digest import Digest, Digests, RowDigest, Words
from amusd.sampling.known_rows import Kept, KnownRow, check_largest, keep
from amusd.sampling.logits import Changes, LogitsProcessor, Row
from amusd.sampling.noise import Counters, Domain, code_of, codes_of_columns, counters, float_gumbel, gumbel_of, key_of

Noise = npt.NDArray[np.float32]
"""[columns]: Gumbel noise times the temperature."""
_LEAST_PROBABILITY = 1e-37
"""Below it a float32 loses its digits: such a token counts as one that cannot come."""
_LARGEST = 700.0
"""An exponent whose exponential is still a number."""
_POSITIONS_KEPT = 16
"""Positions whose noise is kept: the nodes of a tree stand at few, and meet each of them often."""


Mixture = Sequence[tuple[int, float, float]]
"""Different tokens, each with a bias and a slope; slopes are above 0."""
UNPROPOSED = -2.8
"""The logarithm of q for a token that the draft cannot propose. Fitted with the weights of the n-gram cache."""
_Known = Sequence[tuple[int, float, float]]
"""A `Mixture` with columns in the place of tokens."""


@dataclass(slots=True)
class _Best:
    """The best columns of a row by T times the score, relative to one of its logits."""

    log_total: float
    """Logarithm of the sum of the weights, the exponentials, of all columns."""
    scores: list[float]
    columns: list[int]
    log_total_of_logits: float = 0.0
    """`log_total` without noise; of use where something is mixed in."""
    mixed: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Logit and noise of the model's columns that something is mixed into, unless the logit is minus infinity."""


class Ranking:
    """Ranks the next tokens of one sequence by a draft's logits, on any device.

    Where more columns of a row on a device are equal than are asked for, any of them come first.
    """

    def __init__(
        self,
        distribution: Distribution,
        vocab_size: int,
        output_ids: Tensor | None = None,
        *,
        number: int,
        min_probability: float = 0.0,
        num_prompt_tokens: int = 0,
        digests: Digests | None = None,
    ) -> None:
        """`vocab_size`, `output_ids`: of the draft's model; see `LanguageModel`. `number`: tokens of each row at most.

        `min_probability`: only those that are likelier; `num_prompt_tokens`: where the answer begins in a context;
        `digests`: of the model, if its logits are on a device; made when they are needed if None.
        Raises `ValueError` under the ratio test, whose target draws with noise of its own: nothing can be ranked.
        """
        if distribution.rule == "rejection":
            raise ValueError("under the ratio test the target's tokens cannot be ranked")
        if number < 1:
            raise ValueError(f"number={number} must be at least 1")
        self._distribution = distribution
        self._is_plain = distribution.is_plain
        self._number = number
        self._least = max(min_probability, _LEAST_PROBABILITY)
        self._num_prompt_tokens = num_prompt_tokens
        self._num_columns = vocab_size
        self._output_ids = output_ids
        self._digests = digests
        ids = None if output_ids is None else output_ids.cpu().numpy()
        self._ids = np.arange(vocab_size) if ids is None else ids
        self._codes = codes_of_columns(vocab_size, ids)
        self._processor = LogitsProcessor(distribution, vocab_size, ids)
        self._keep_noise()

    @property
    def needs_contexts(self) -> bool:
        """Whether `rank` looks at the tokens before a row."""
        return self._processor.needs_context

    @property
    def digest(self) -> Digest | None:
        """The digest that a pass has to compute; None: whole rows are ranked."""
        if self._digests is None:
            return None
        return self._digests.few if self._is_plain else self._digests.many

    def inputs(
        self,
        positions: Sequence[int],
        contexts: Sequence[Sequence[int]] = (),
        mixtures: Sequence[Mixture] = (),
    ) -> npt.NDArray[np.int64]:
        """The inputs [rows, words] of `digest`; parameters as of `rank`."""
        assert self.digest is not None
        asked: list[list[int]] = []
        for row in range(len(positions) if mixtures or not self._is_plain else 0):
            columns = [column for column, _, _ in self._known(mixtures[row])] if mixtures else []
            if not self._is_plain:
                columns += self._processor.raised(self._changes(contexts[row] if self.needs_contexts else ())).tolist()
            asked.append([column for column in columns if column < self._num_columns][: self.digest.num_asked])
        temperature = self._distribution.temperature
        keys = [self._key(position) for position in positions]
        return self.digest.inputs(keys, scale=temperature, temperature=temperature or 1.0, asked=asked)

    def rank(
        self,
        logits: Tensor,
        positions: Sequence[int],
        contexts: Sequence[Sequence[int]] = (),
        mixtures: Sequence[Mixture] = (),
        outputs: Words | None = None,
    ) -> list[Guesses]:
        """Return the likeliest tokens of each row of `logits` [rows, columns]; row `i` scores position `positions[i]`.

        The best token comes first; of equal ones, that of the first column. A row has fewer tokens than asked for if
        filters leave fewer, or if the others are less likely than wanted. Probabilities are above 0 and sum to at most
        1. With a digest only the columns that it holds are ranked.

        `contexts`: all tokens before each position, if `needs_contexts`. `mixtures`: what is known of each row beside
        its logits; empty: nothing. `outputs`: those of `digest`, if the pass has computed it. Raises `ValueError`
        unless there is one of each for every row, and `NotFiniteError` if the largest logit of a row is NaN or
        infinite.
        """
        if len(positions) != len(logits) or (self.needs_contexts and len(contexts) != len(logits)):
            raise ValueError(f"{len(logits)} rows, {len(positions)} positions and {len(contexts)} contexts")
        if mixtures and len(mixtures) != len(logits):
            raise ValueError(f"{len(logits)} rows and {len(mixtures)} mixtures")
        if self._digests is None and logits.device.type != "cpu":
            self._digests = Digests(self._num_columns, self._output_ids, logits.device, num_best=self._number)
        rows: Sequence[Row | RowDigest]
        if self.digest is None:
            rows = list(logits.float().numpy())
        else:
            if outputs is None:
                outputs = self.digest.outputs(logits, self.inputs(positions, contexts, mixtures))
            rows = [self.digest.read(row) for row in outputs]
        ranked = []
        for index, (row, position) in enumerate(zip(rows, positions, strict=True)):
            check_largest(row.winner_logit if isinstance(row, RowDigest) else row[row.argmax()])
            known = self._known(mixtures[index]) if mixtures else []
            context = contexts[index] if self.needs_contexts else ()
            if self._is_plain:
                best = self._best_of_plain(row, known, position)
            else:
                best = self._best_of_shaped(row, known, context, position)
            ranked.append(self._ranked(best))
        return ranked

    # Where nothing but a temperature shapes the distribution

    def _best_of_plain(self, row: Row | RowDigest, known: _Known, position: int) -> _Best:
        best = self._best_of_digest(row) if isinstance(row, RowDigest) else self._best_of_row(row, known, position)
        return self._mixed(best, known, position) if known else best

    def _best_of_row(self, row: Row, known: _Known, position: int) -> _Best:
        """Relative to the largest logit, or large logits would round the noise away."""
        relative = row - row[row.argmax()]
        noise = self._noise_at(position) if self._distribution.temperature > 0 else None
        best = self._best_of(relative if noise is None else relative + noise)
        if known:
            best.log_total_of_logits = best.log_total if noise is None else math.log(float(np.exp(relative).sum()))
            for column, _, _ in known:
                if column < len(relative) and relative[column] > -math.inf:
                    best.mixed[column] = float(relative[column]), 0.0 if noise is None else float(noise[column])
        return best

    def _best_of_digest(self, digest: RowDigest) -> _Best:
        """Relative to the winner's logit."""
        own = float(digest.winner_logit)
        scores = (digest.best_scores - digest.winner_logit).tolist()
        log_total = float(digest.best_scores[digest.best_scores.argmax()]) - own - digest.log_share
        best = _Best(log_total, scores, digest.best.tolist(), log_total_of_logits=-digest.log_probability)
        asked = zip(digest.asked.tolist(), digest.asked_logits.tolist(), digest.asked_scores.tolist(), strict=True)
        best.mixed = {column: (logit - own, score - logit) for column, logit, score in asked if logit > -math.inf}
        return best

    def _mixed(self, best: _Best, known: _Known, position: int) -> _Best:
        """`best` with what is known mixed in. Nothing is divided by the new sum, which is the same for all columns."""
        mass = 1.0  # of `best.log_total`
        scores: dict[int, float] = {}
        for column, bias, slope in known:
            log_q = None
            if column in best.mixed:
                own, noise = best.mixed[column]
                mass -= math.exp(own + noise - best.log_total)
                log_q = own - best.log_total_of_logits
            else:
                temperature = self._distribution.temperature
                noise = temperature * gumbel_of(int(self._ids[column]), self._key(position)) if temperature else 0.0
            scores[column] = best.log_total_of_logits + _log_weight(log_q, bias, slope) + noise
            mass += math.exp(min(scores[column] - best.log_total, _LARGEST))
        for score, column in zip(best.scores, best.columns, strict=True):
            scores.setdefault(column, score)
        return _Best(best.log_total + math.log(mass), list(scores.values()), list(scores))

    # Where filters or penalties do

    def _best_of_shaped(self, row: Row | RowDigest, known: _Known, context: Sequence[int], position: int) -> _Best:
        """The best of a processed row; of a digest only the columns that it holds."""
        mixed = KnownRow.of(row, self._num_columns) if isinstance(row, RowDigest) else KnownRow(row)
        mixed = self._mixed_row(mixed, known)
        changes = self._changes(context)
        kept = keep(self._distribution, self._processor, mixed, changes)
        if kept is None:  # ranked all the same, as if there were no other columns
            kept = Kept(self._processor.shaped(mixed.logits, mixed.known(changes)))
        places = slice(None) if kept.possible is None else kept.possible
        processed = kept.row[places]
        scores = processed - processed[processed.argmax()]  # as in `_best_of_row`
        if (temperature := self._distribution.temperature) > 0:
            scores *= np.float32(temperature)
            if mixed.columns is None:
                scores += self._noise_at(position)[places]
            else:
                scores += _noise_of(self._codes[mixed.columns[places]], self._distribution.seed, temperature, position)
        best = self._best_of(scores)
        chosen = best.columns if kept.possible is None else kept.possible[best.columns].tolist()
        best.columns = [mixed.column_at(place) for place in chosen]
        return best

    def _mixed_row(self, row: KnownRow, known: _Known) -> KnownRow:
        """The logits of the mixture, as in `_mixed`; columns behind the model's are known, too."""
        num_new = len(self._ids) - self._num_columns
        if not num_new and not known:
            return row
        mixed, log_total = row.extended(num_new), row.log_total
        for column, bias, slope in known:
            place = mixed.place(column)
            log_q = float(mixed.logits[place]) - log_total
            mixed.logits[place] = log_total + _log_weight(log_q if log_q > -math.inf else None, bias, slope)
        return mixed

    # All

    def _best_of(self, scores: Row) -> _Best:
        """The best of `scores` [known]: T times the scores, less something that all of them have in common."""
        first = scores.argmax()
        top = scores[first]
        weights = np.exp(scores - top if top else scores)  # greedy: relative already
        total = float(weights.sum())
        # To a chain every column is likely enough: too many to sort.
        likely = np.array([first]) if self._number == 1 else np.flatnonzero(weights > self._least * total)
        best = likely[np.argsort(-scores[likely], kind="stable")[: self._number]]
        return _Best(float(top) + math.log(total), scores[best].tolist(), best.tolist())

    def _ranked(self, best: _Best) -> Guesses:
        order = sorted(zip(best.scores, best.columns, strict=True), key=lambda one: (-one[0], one[1]))[: self._number]
        weights = [math.exp(score - best.log_total) for score, _ in order]
        together = max(1.0, sum(weights))
        likely = [weight / together for weight in weights if weight > self._least]
        ids = (int(self._ids[column]) for _, column in order[: len(likely)])
        return tuple(zip(ids, likely, strict=True))

    def _known(self, mixture: Mixture) -> _Known:
        return [(self._column(token_id), bias, slope) for token_id, bias, slope in mixture]

    def _column(self, token_id: int) -> int:
        """The column that scores this token; a token without one gets a new column."""
        column = self._processor.column(token_id)
        if column is None:
            column = len(self._ids)
            self._ids = np.append(self._ids, token_id)
            self._processor = LogitsProcessor(self._distribution, len(self._ids), self._ids)
            if not self._is_plain:
                self._codes = np.append(self._codes, np.uint32(code_of(token_id)))
                self._keep_noise()
        return column

    def _keep_noise(self) -> None:
        """Keep the noise of all columns for the positions last asked for: do not write to it."""
        distribution = self._distribution
        make = partial(_noise_of, self._codes, distribution.seed, distribution.temperature)
        self._noise_at = lru_cache(maxsize=_POSITIONS_KEPT)(make)

    def _changes(self, context: Sequence[int]) -> Changes:
        return self._processor.changes(context[: self._num_prompt_tokens], context[self._num_prompt_tokens :])

    def _key(self, position: int) -> int:
        return key_of(self._distribution.seed, position, Domain.MATCHING)


def _noise_of(codes: Counters, seed: int, temperature: float, position: int) -> Noise:
    """The noise of the columns with these codes, times the temperature."""
    noise = float_gumbel(counters(key_of(seed, position, Domain.MATCHING), codes))
    noise *= np.float32(temperature)
    return noise


def _log_weight(log_q: float | None, bias: float, slope: float) -> float:
    """The logarithm of what a token weighs in a mixture; `log_q` is None for one that the draft cannot propose."""
    return bias + slope * UNPROPOSED if log_q is None else max(log_q, bias + slope * log_q)
