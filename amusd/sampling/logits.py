"""From logits to the distribution that is sampled: bias, penalties, temperature, top-k, top-p, min-p, in this order.

One row at a time, in float32 on the host. Filters give the columns that are left, and look at likely tokens only:
sorting a whole vocabulary would cost more than the rest together. Draft and target apply the same functions, each to
its own logits.

References:
    Order and meaning as in transformers' logits processors; penalties count as in vLLM: repetition over prompt and
    answer, presence over the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from amusd.config import Distribution

Row = npt.NDArray[np.float32]
"""[columns]."""
Columns = npt.NDArray[np.intp]
"""Column numbers, ascending."""

_FIRST_MARGIN = 8.0
"""Nats below the best logit within which the first look for likely tokens goes."""
_WIDEST_MARGIN = 1e4
"""Beyond it, all columns are looked at."""


class LogitsProcessor:
    """Applies one request's distribution. `output_ids` as of `LanguageModel`: which token each column scores."""

    def __init__(
        self, distribution: Distribution, num_columns: int, output_ids: npt.NDArray[np.int64] | None = None
    ) -> None:
        self._distribution = distribution
        self._num_columns = num_columns
        self._row = np.empty(num_columns, dtype=np.float32)
        self._weights = np.empty(num_columns, dtype=np.float32)
        self._column_of: dict[int, int] | None = None
        if output_ids is not None and (self.needs_context or distribution.logit_bias):
            self._column_of = {int(token_id): column for column, token_id in enumerate(output_ids)}
        biases = [(self._column(token_id), bias) for token_id, bias in distribution.logit_bias]
        self._biases = [(column, np.float32(bias)) for column, bias in biases if column is not None]

        self._is_plain = distribution == Distribution(
            temperature=distribution.temperature, acceptance=distribution.acceptance, seed=distribution.seed
        ) and distribution.temperature in (0, 1)

    @property
    def needs_context(self) -> bool:
        """Whether `process` looks at the tokens before a row."""
        return self._distribution.repetition_penalty != 1.0 or self._distribution.presence_penalty != 0.0

    def process(
        self, logits: Row, prompt: Sequence[int] = (), answer: Sequence[int] = ()
    ) -> tuple[Row, Columns | None]:
        """The processed logits [columns], valid until the next call, and the columns that are left; None: all.

        Where nothing is to be done, the logits themselves come back.

        The softmax over what is left is the distribution that is sampled. `prompt` and `answer` are the tokens before
        the one that is chosen; only penalties read them.
        """
        distribution = self._distribution
        if self._is_plain:
            return logits, None
        row = self._row
        np.copyto(row, logits)
        for column, bias in self._biases:
            row[column] += bias
        if self.needs_context:
            self._penalize(row, prompt, answer)
        if distribution.temperature not in (0, 1):
            np.divide(row, np.float32(distribution.temperature), out=row)
        columns: Columns | None = None
        if 0 < distribution.top_k < self._num_columns:
            columns = _top_k(row, distribution.top_k)
        if distribution.top_p < 1:
            columns = self._top_p(row, columns)
        if distribution.min_p > 0:
            least = row.max() + np.log(np.float32(distribution.min_p))
            columns = np.flatnonzero(row >= least) if columns is None else columns[row[columns] >= least]
        return row, columns

    def _penalize(self, row: Row, prompt: Sequence[int], answer: Sequence[int]) -> None:
        penalty = np.float32(self._distribution.repetition_penalty)
        written = self._columns(answer)
        if penalty != 1:
            seen = np.union1d(self._columns(prompt), written)
            row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        row[written] -= np.float32(self._distribution.presence_penalty)

    def _top_p(self, row: Row, columns: Columns | None) -> Columns:
        """The fewest most likely columns with at least `top_p` of the mass; of equal ones the first."""
        best = row.max()
        if columns is None:
            weights = np.exp(np.subtract(row, best, out=self._weights), out=self._weights)
            wanted = self._distribution.top_p * weights.sum(dtype=np.float64)
            columns = _likely_until(row, lambda likely: bool(weights[likely].sum(dtype=np.float64) >= wanted))
            likely_weights = weights[columns]
        else:
            likely_weights = np.exp(row[columns] - best)
            wanted = self._distribution.top_p * likely_weights.sum(dtype=np.float64)
        order = np.argsort(-row[columns], kind="stable")
        sorted_weights = likely_weights[order]
        before = np.cumsum(sorted_weights, dtype=np.float64) - sorted_weights
        return np.sort(columns[order[before < wanted]])

    def _columns(self, token_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """The columns of distinct tokens."""
        columns = (self._column(token_id) for token_id in set(token_ids))
        return np.array([column for column in columns if column is not None], dtype=np.int64)

    def _column(self, token_id: int) -> int | None:
        if self._column_of is not None:
            return self._column_of.get(token_id)
        return token_id if token_id < self._num_columns else None


def _top_k(row: Row, top_k: int) -> Columns:
    """The `top_k` largest; ties with the last of them stay."""
    likely = _likely_until(row, lambda columns: len(columns) >= top_k)
    values = row[likely]
    kept: Columns = likely[values >= np.partition(values, len(values) - top_k)[len(values) - top_k]]
    return kept


def _likely_until(row: Row, enough: Callable[[Columns], bool]) -> Columns:
    """The columns within a margin of the best, which grows until they are enough."""
    best, margin = row.max(), _FIRST_MARGIN
    while margin < _WIDEST_MARGIN:
        likely = np.flatnonzero(row >= best - np.float32(margin))
        if enough(likely):
            return likely
        margin *= 2
    return np.arange(len(row))
