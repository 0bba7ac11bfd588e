"""From logits to the distribution that is sampled: bias, penalties, temperature, top-k, top-p, min-p, in this order.

One row at a time, in float32 on the host. Filters give the columns that are left, and look at likely tokens only:
sorting a whole vocabulary would cost more than the rest together. Draft and target apply the same functions, each to
its own logits.

References:
    Order and meaning as in transformers' logits processors; penalties count as in vLLM: repetition over prompt and
    answer, presence and frequency over the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from amusd.config import Distribution

Row = npt.NDArray[np.float32]
"""[columns]."""
Columns = npt.NDArray[np.intp]
"""Column numbers, ascending."""

_NONE: Columns = np.empty(0, dtype=np.intp)
_FIRST_MARGIN = 8.0
"""Nats below the best logit within which the first look for likely tokens goes."""
_WIDEST_MARGIN = 1e4
"""The margin beyond which all columns are looked at."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Columns whose logits change, or the places where these columns are found."""

    biased: Columns
    biases: Row
    """The number that is added to each of them, one after another."""
    penalized: Columns
    """Columns that `repetition_penalty` changes; ascending."""
    written: Columns
    """Columns that `presence_penalty` and `frequency_penalty` change; ascending."""
    reductions: Row
    """The number that is taken off each of them."""

    @property
    def size(self) -> int:
        """How many there are; those that change in two ways count twice."""
        return len(self.biased) + len(self.penalized) + len(self.written)


class LogitsProcessor:
    """Applies one request's distribution. `output_ids` as of `LanguageModel`: which token each column scores."""

    def __init__(
        self, distribution: Distribution, num_columns: int, output_ids: npt.NDArray[np.int64] | None = None
    ) -> None:
        self._distribution = distribution
        self._num_columns = num_columns
        self._output_ids = output_ids
        self._row = np.empty(num_columns, dtype=np.float32)
        self._weights = np.empty(num_columns, dtype=np.float32)
        known = [(column, bias) for token, bias in distribution.logit_bias for column in self._counted([token])[0]]
        columns = np.array([column for column, _ in known], dtype=np.intp)
        biases = np.array([bias for _, bias in known], dtype=np.float32)
        self._bias_changes = Changes(columns, biases, _NONE, _NONE, np.empty(0, dtype=np.float32))
        self.divisor: np.float32 = np.float32(distribution.temperature or 1.0)
        """The divisor of the logits: the temperature, or 1."""
        self._leaves_rows = distribution.is_plain and distribution.temperature in (0, 1)

    @property
    def needs_context(self) -> bool:
        """Whether `process` looks at the tokens before a row."""
        return self._distribution.has_penalties

    @property
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p take columns away."""
        distribution = self._distribution
        by_number = 0 < distribution.top_k < self._num_columns
        return by_number or distribution.top_p < 1 or distribution.min_p > 0

    def process(
        self, logits: Row, prompt: Sequence[int] = (), answer: Sequence[int] = ()
    ) -> tuple[Row, Columns | None]:
        """The processed logits [columns], valid until the next call, and the columns that are left; None: all.

        Where nothing is to be done, the logits themselves come back.

        The softmax over what is left is the distribution that is sampled. `prompt` and `answer` are the tokens before
        the one that is chosen; only penalties read them.
        """
        row = self.shaped(logits, self.changes(prompt, answer))
        return row, self.filtered(row)

    def changes(self, prompt: Sequence[int], answer: Sequence[int]) -> Changes:
        """The columns whose logits bias and penalties change after `prompt` and `answer`."""
        if not self.needs_context:
            return self._bias_changes
        written, counts = self._counted(answer)
        penalized = _NONE
        if self._distribution.repetition_penalty != 1:
            penalized = np.union1d(self._counted(prompt)[0], written)
        presence, frequency = self._distribution.presence_penalty, self._distribution.frequency_penalty
        reductions = (presence + frequency * counts).astype(np.float32)
        return replace(self._bias_changes, penalized=penalized, written=written, reductions=reductions)

    def shaped(self, logits: Row, changes: Changes) -> Row:
        """`logits` with bias, penalties and temperature applied; `changes` holds places in it. Valid as of `process`.

        `logits`: of all columns or of some.
        """
        if self._leaves_rows:
            return logits
        row = self._row[: len(logits)]
        if not changes.size:
            return np.divide(logits, self.divisor, out=row)
        np.copyto(row, logits)
        if len(changes.biased):
            np.add.at(row, changes.biased, changes.biases)
        if len(changes.penalized):
            penalty, seen = np.float32(self._distribution.repetition_penalty), row[changes.penalized]
            row[changes.penalized] = np.where(seen > 0, seen / penalty, seen * penalty)
        row[changes.written] -= changes.reductions
        if self.divisor != 1:
            np.divide(row, self.divisor, out=row)
        return row

    def raised(self, changes: Changes) -> Columns:
        """The columns whose logits may have become larger, also after a part of the answer alone."""
        raised = [changes.biased[changes.biases > 0]]
        if self._distribution.repetition_penalty < 1:
            raised.append(changes.penalized)
        if self._distribution.presence_penalty < 0 or self._distribution.frequency_penalty < 0:
            raised.append(changes.written)
        return np.unique(np.concatenate(raised))

    def filtered(self, row: Row) -> Columns | None:
        """The columns of a processed row that filters leave; None: all. `row`: any number of columns."""
        distribution = self._distribution
        columns: Columns | None = None
        if 0 < distribution.top_k < len(row):
            columns = top_k_columns(row, distribution.top_k)
        if distribution.top_p < 1:
            columns = self._top_p(row, columns)
        if distribution.min_p > 0:
            least = self.least(row)
            columns = np.flatnonzero(row >= least) if columns is None else columns[row[columns] >= least]
        return columns

    def least(self, row: Row) -> np.float32:
        """The logit that min-p asks for."""
        least: np.float32 = np.float32(row.max() + np.log(np.float32(self._distribution.min_p)))
        return least

    def _top_p(self, row: Row, columns: Columns | None) -> Columns:
        """The fewest most likely columns with at least `top_p` of the mass; of equal ones the first."""
        best = row.max()
        if columns is None:
            weights = self._weights[: len(row)]
            np.exp(np.subtract(row, best, out=weights), out=weights)
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

    def column(self, token_id: int) -> int | None:
        """The column that scores a token; None: there is none."""
        if self._output_ids is None:
            return token_id if token_id < self._num_columns else None
        column = int(self._column_of[token_id]) if token_id < len(self._column_of) else -1
        return column if column >= 0 else None

    def _counted(self, token_ids: Sequence[int]) -> tuple[Columns, Columns]:
        """The columns of distinct tokens, ascending, and how often each of these occurs."""
        ids, counts = np.unique(np.asarray(token_ids, dtype=np.intp), return_counts=True)
        if self._output_ids is None:
            is_known = ids < self._num_columns
            return ids[is_known], counts[is_known]
        is_known = ids < len(self._column_of)
        columns, counts = self._column_of[ids[is_known]], counts[is_known]
        order = np.argsort(columns)
        order = order[columns[order] >= 0]
        return columns[order], counts[order]

    @cached_property
    def _column_of(self) -> Columns:
        """[largest id + 1]: the column of each token; -1: it has none."""
        assert self._output_ids is not None
        columns = np.full(int(self._output_ids.max()) + 1, -1, dtype=np.intp)
        columns[self._output_ids] = np.arange(len(self._output_ids))
        return columns


def top_k_columns(row: Row, top_k: int) -> Columns:
    """The `top_k` largest of a row that has as many, ascending; ties with the last of them stay."""
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
