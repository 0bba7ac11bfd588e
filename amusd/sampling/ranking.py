"""The likeliest next tokens of the target, as a draft sees them: what becomes the children of a node of its tree.

The target's token is the argmax of its scores: processed logits and, under matching, the noise that the draft knows as
well. So the draft ranks by its own scores; the first of a row is the token that `TokenSampler` would choose. Scores are
summed in float32, there in float64: they may differ where two tokens tie to rounding.

The probabilities are estimates. They would be exact if standard Gumbel noise e were what the draft's logits l are wrong
by: with the noise g that both know, the target takes the argmax of (l + e) / T + g at temperature T, which, given l and
g, is distributed as softmax(l + T g): the softmax of T times the scores. Greedy: the softmax of the logits.

Something else may know a part of a row's distribution (`amusd/drafters/ngram_cache.py`). The row is then ranked as that
of a model which gives those tokens that much and shares the rest out as the draft does; a token that the draft cannot
propose gets a column of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from amusd.config import Distribution
from amusd.sampling.digest import Digest, Digests, RowDigest, Words
from amusd.sampling.kept_noise import KeptNoise, Noise, float_gumbel
from amusd.sampling.logits import Changes, LogitsProcessor, Row
from amusd.sampling.noise import Domain, codes_of, counters, key_of
from amusd.sampling.partial_row import PartialRow, keep
from amusd.sampling.pass_rows import check_largest


@dataclass(frozen=True, slots=True)
class RankedTokens:
    """The likeliest tokens behind one row, best first; of equal ones that of the first column."""

    token_ids: tuple[int, ...]
    """As many as asked for; fewer where filters leave fewer, or the rest is less likely than wanted."""
    probabilities: tuple[float, ...]
    """Of each, above 0; together at most 1."""


Mixture = Sequence[tuple[int, float]]
"""Different tokens with the probability that is theirs before the model is asked, each above 0, together below 1."""


def check_rows(
    num_rows: int,
    positions: Sequence[int],
    contexts: Sequence[Sequence[int]] | None,
    mixtures: Sequence[Mixture],
) -> None:
    """Raises `ValueError` unless all that is said of rows is said of as many. `contexts`: None where none is needed."""
    if len(positions) != num_rows or (contexts is not None and len(contexts) != num_rows):
        raise ValueError(f"{num_rows} rows, {len(positions)} positions and {len(contexts or ())} contexts")
    if mixtures and len(mixtures) != num_rows:
        raise ValueError(f"{num_rows} rows and {len(mixtures)} mixtures")


class Ranking:
    """Ranks the next tokens of one sequence by a draft's logits."""

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
        `digests`: of the model, if its logits are on a device.
        Raises `ValueError` under the ratio test, whose target draws with noise of its own: nothing can be ranked.
        """
        if distribution.rule == "rejection":
            raise ValueError("under the ratio test the target's tokens cannot be ranked")
        if number < 1:
            raise ValueError(f"number={number} must be at least 1")
        self._distribution = distribution
        self._sharpness = np.float32(distribution.temperature or 1.0)
        self._number = number
        self._min_probability = min_probability
        self._num_prompt_tokens = num_prompt_tokens
        self._num_model_columns = vocab_size
        self._output_ids = output_ids
        self._digests = digests
        self._column_of: dict[int, int] | None = None
        self._set_columns(np.arange(vocab_size) if output_ids is None else output_ids.cpu().numpy())

    @property
    def needs_contexts(self) -> bool:
        """Whether `rank` looks at the tokens before a row."""
        return self._processor.needs_context

    @property
    def digest(self) -> Digest | None:
        """The digest that a pass has to compute; None: whole rows are ranked."""
        return None if self._digests is None else self._digests.many

    def inputs(
        self,
        positions: Sequence[int],
        contexts: Sequence[Sequence[int]] = (),
        mixtures: Sequence[Mixture] = (),
    ) -> npt.NDArray[np.int64]:
        """The inputs [rows, words] of `digest`; parameters as of `rank`."""
        assert self.digest is not None
        temperature, seed = self._distribution.temperature, self._distribution.seed
        asked = []
        for row in range(len(positions)):
            mixed = self._columns([token_id for token_id, _ in mixtures[row]]) if mixtures else []
            raised = self._processor.raised(self._changes(contexts[row] if self.needs_contexts else ()))
            columns = [column for column in (*mixed, *raised.tolist()) if column < self._num_model_columns]
            asked.append(columns[: self.digest.num_asked])
        keys = [key_of(seed, position, Domain.MATCHING) for position in positions]
        return self.digest.inputs(keys, scale=temperature, temperature=temperature or 1.0, asked=asked)

    def rank(
        self,
        logits: Tensor,
        positions: Sequence[int],
        contexts: Sequence[Sequence[int]] = (),
        mixtures: Sequence[Mixture] = (),
        outputs: Words | None = None,
    ) -> list[RankedTokens]:
        """[rows, columns] -> the likeliest tokens of each row; the token that row `i` scores stands at `positions[i]`.

        `contexts`: all tokens before each of them, if `needs_contexts`; `mixtures`: what is known of each row beside
        its logits (none: nothing of any); `outputs`: of `digest`, where the pass has computed it. Raises `ValueError`
        unless all are as many, and `NotFiniteError` where the largest logit of a row is NaN or infinite. Of a digest
        only the columns that it holds are ranked.
        """
        check_rows(len(logits), positions, contexts if self.needs_contexts else None, mixtures)
        if self._digests is None and logits.device.type != "cpu":
            self._digests = Digests(self._num_model_columns, self._output_ids, logits.device)
        if outputs is None and self.digest is not None:
            outputs = self.digest.outputs(logits, self.inputs(positions, contexts, mixtures))
        rows = logits.float().numpy() if outputs is None else None
        ranked = []
        for index, position in enumerate(positions):
            mixture = mixtures[index] if mixtures else ()
            context = contexts[index] if self.needs_contexts else ()
            if rows is not None:
                check_largest(rows[index].max())
                ranked.append(self._rank_row(self._mix(rows[index], mixture), context, position))
            elif outputs is not None and self.digest is not None:
                digest = self.digest.read(outputs[index])
                check_largest(digest.winner_logit)
                ranked.append(self._rank_digest(digest, mixture, context, position))
        return ranked

    def _set_columns(self, ids: npt.NDArray[np.int64]) -> None:
        """Which token each column scores."""
        distribution, num_columns = self._distribution, len(ids)
        identity = num_columns == self._num_model_columns and np.array_equal(ids, np.arange(num_columns))
        self._ids = ids
        self._processor = LogitsProcessor(distribution, num_columns, None if identity else ids)
        self._noise: KeptNoise | None = None
        if distribution.temperature > 0:
            self._codes = codes_of(int(ids.max()) + 1)[ids]
            self._noise = KeptNoise(distribution.seed, self._codes)
        self._mixed, self._scores, self._weights = np.empty((3, num_columns), dtype=np.float32)

    def _columns(self, token_ids: Sequence[int]) -> list[int]:
        """Where these tokens are scored; those that are nowhere get new columns behind the model's."""
        if self._column_of is None:
            self._column_of = {int(token_id): column for column, token_id in enumerate(self._ids)}
        new = [token_id for token_id in token_ids if token_id not in self._column_of]
        if new:
            self._column_of.update({token_id: len(self._ids) + place for place, token_id in enumerate(new)})
            self._set_columns(np.concatenate((self._ids, new)))
        return [self._column_of[token_id] for token_id in token_ids]

    def _mix(self, row: Row, mixture: Mixture) -> Row:
        """`row` [model's columns] as the logits [columns] of the mixture; valid until the next call."""
        columns = self._columns([token_id for token_id, _ in mixture])
        if len(self._ids) == len(row) and not mixture:
            return row
        mixed = self._mixed
        mixed[: len(row)] = row
        mixed[len(row) :] = -np.inf
        if mixture:
            best = row.max()
            total = np.exp(np.subtract(row, best, out=self._weights[: len(row)]), out=self._weights[: len(row)]).sum()
            shares = np.array([share for _, share in mixture])
            # Up to what the model has left, log(1 - all shares), which no ranking and no softmax notices.
            known = np.log(shares / (1 - shares.sum())) + best + np.log(total)
            mixed[columns] = np.logaddexp(mixed[columns], known)
        return mixed

    def _rank_row(self, row: Row, context: Sequence[int], position: int) -> RankedTokens:
        """`row` [columns]: a whole one."""
        processed, columns = self._processor.process(row, *self._seen(context))
        if self._noise is None:  # no filter changes an argmax
            return self._rank(processed, self._ids, None)
        noise = self._noise.at([position])[0]
        if columns is None:
            return self._rank(processed, self._ids, noise)
        return self._rank(processed[columns], self._ids[columns], noise[columns])

    def _rank_digest(self, digest: RowDigest, mixture: Mixture, context: Sequence[int], position: int) -> RankedTokens:
        part = self._mix_part(PartialRow.of(digest, self._num_model_columns), mixture)
        changes = self._changes(context)
        kept = keep(self._distribution, self._processor, part, changes)
        if kept is not None:
            row, places = kept.row, np.flatnonzero(kept.possible)
        else:  # ranked all the same, as if there were no other columns
            row = part.logits.copy()
            self._processor.shape(row, part.known(changes))
            places = np.arange(len(row))
        columns = part.columns[places]
        if self._noise is None:
            return self._rank(row[places], self._ids[columns], None)
        key = key_of(self._distribution.seed, position, Domain.MATCHING)
        return self._rank(row[places], self._ids[columns], float_gumbel(counters(key, self._codes[columns])))

    def _mix_part(self, part: PartialRow, mixture: Mixture) -> PartialRow:
        """As `_mix`; the columns behind the model's are known, too."""
        columns = np.array(self._columns([token_id for token_id, _ in mixture]), dtype=np.intp)
        new = np.arange(self._num_model_columns, len(self._ids))
        if not len(new) and not len(columns):
            return part
        mixed = np.concatenate((part.logits, np.full(len(new), -np.inf, dtype=np.float32)))
        part = replace(
            part,
            num_columns=len(self._ids),
            columns=np.concatenate((part.columns, new)),
            logits=mixed,
            is_extra=np.concatenate((part.is_extra, np.zeros(len(new), dtype=np.bool_))),
        )
        if mixture:
            shares = np.array([share for _, share in mixture])
            total = float(part.digest.winner_logit) - part.digest.log_probability
            known = np.log(shares / (1 - shares.sum())) + total
            places = np.searchsorted(part.columns, columns)
            mixed[places] = np.logaddexp(mixed[places], known)
        return part

    def _changes(self, context: Sequence[int]) -> Changes:
        return self._processor.changes(*self._seen(context))

    def _seen(self, context: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        return context[: self._num_prompt_tokens], context[self._num_prompt_tokens :]

    def _rank(self, row: Row, ids: npt.NDArray[np.int64], noise: Noise | None) -> RankedTokens:
        """`row`, `ids`, `noise` [columns]: processed logits of those that are left, and what belongs to them."""
        scores, weights = self._scores[: len(row)], self._weights[: len(row)]
        np.subtract(row, row[row.argmax()], out=scores)  # before the noise is added: large logits would round it away
        if noise is not None:
            np.add(scores, noise, out=scores)
            np.subtract(scores, scores[scores.argmax()], out=scores)
        total = float(np.exp(np.multiply(scores, self._sharpness, out=weights), out=weights).sum())
        likely = np.flatnonzero(weights > self._min_probability * total)
        order = np.argsort(-scores[likely], kind="stable")[: self._number]
        best, found = likely[order], weights[likely[order]].astype(np.float64)
        return RankedTokens(tuple(ids[best].tolist()), tuple((found / max(total, found.sum())).tolist()))
