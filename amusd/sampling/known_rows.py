"""The host's knowledge of the rows of logits of a pass, and what bias, penalties and filters leave of them.

A row is known as a whole, or by the columns of its digest and bounds on all others (`digest.py`). Matching, greedy
decoding and the guesses of a tree read both in the same way, as a `KnownRow`; the ratio test reads whole rows.

The known columns go through `logits.py` in the same arithmetic whatever else is known. `Kept.sure` and
`Kept.possible` say what the unknown columns leave open. Sums that the device made are trusted up to a margin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from amusd.config import Distribution
from amusd.errors import NotFiniteError
from amusd.sampling.digest import Digest, RowDigest, Words
from amusd.sampling.logits import Changes, Columns, LogitsProcessor, Row, top_k_columns
from amusd.types import TopLogprobs

Mask = npt.NDArray[np.bool_]
_Bounds = tuple[float, float]
"""The least and the most."""

_SUM_MARGIN = 1e-4
"""Relative error of a sum of weights on a device at most, with much to spare."""
_LOST_WEIGHT = 1e-37
"""A device may take a weight below this for 0."""
_LARGEST = 700.0
"""An exponent whose exponential is still a number."""
_ORDER_MARGIN = 1e-9
"""Relative difference between float64 sums of the same weights in different orders at most."""


class PassRows:
    """The rows of one pass: digests if the device has computed them, and whole rows where these are asked for."""

    def __init__(self, logits: Tensor, digest: Digest | None, outputs: Words | None) -> None:
        """`outputs`: of `digest`; None: whole rows are seen."""
        self._logits = logits
        self._digest = digest
        self._outputs = outputs
        self._digests: dict[int, RowDigest] = {}
        self._whole: dict[int, Row] = {}
        self._log_totals: dict[int, tuple[float, float]] = {}

    def digest(self, row: int) -> RowDigest | None:
        """The digest of a row that was not asked for as a whole. Raises `NotFiniteError` as `whole` does."""
        if self._outputs is None or self._digest is None or row in self._whole:
            return None
        if row not in self._digests:
            self._digests[row] = digest = self._digest.read(self._outputs[row])
            check_largest(digest.winner_logit)
        return self._digests[row]

    def whole(self, row: int) -> Row:
        """[columns] float32. Raises `NotFiniteError` where the largest of them is NaN or infinite."""
        if self._outputs is None and not self._whole:
            self._whole.update(enumerate(self._logits.float().cpu().numpy()))  # in one copy, as any may be asked for
        elif row not in self._whole:
            self._whole[row] = self._logits[row].float().cpu().numpy()
        check_largest(self._whole[row].max())
        return self._whole[row]

    def log_probability(self, row: int, column: int) -> float:
        """The log-probability of a column under the softmax of the logits."""
        digest = self.digest(row)
        logit = float(self.whole(row)[column]) if digest is None else digest.logit_of(column)
        logit_of_one, log_total = self._log_total(row)
        return logit - logit_of_one - log_total

    def top_log_probabilities(self, row: int, number: int) -> TopLogprobs:
        """The `number` most likely columns under the softmax of the logits; of equal ones the first that are known.

        Fewer where fewer are possible. A digest must have likely columns.
        """
        digest = self.digest(row)
        if digest is None:
            logits = self.whole(row)
            columns = top_k_columns(logits, min(number, len(logits)))
            logits = logits[columns]
        else:
            columns, logits = digest.likely, digest.likely_logits
        logit_of_one, log_total = self._log_total(row)
        order = np.lexsort((columns, -logits))[:number]
        return tuple(
            (int(columns[place]), float(logits[place]) - logit_of_one - log_total)
            for place in order
            if logits[place] > -math.inf
        )

    def _log_total(self, row: int) -> tuple[float, float]:
        """The logit of one column, and the logarithm of the sum of exp(logit - that one) over all columns."""
        digest = self.digest(row)
        if digest is not None:
            return float(digest.winner_logit), -digest.log_probability
        if row not in self._log_totals:
            exact = self.whole(row).astype(np.float64)
            largest = exact.max()
            self._log_totals[row] = float(largest), float(np.log(np.exp(exact - largest).sum()))
        return self._log_totals[row]


def check_largest(logit: np.float32) -> None:
    """Raise `NotFiniteError` unless the largest logit of a row is a finite number. NaN is larger than any."""
    if not math.isfinite(logit):
        raise NotFiniteError(f"the largest logit is {logit}")


@dataclass(frozen=True, slots=True)
class KnownRow:
    """The known columns of a row of logits, and bounds on the others."""

    logits: Row
    """[known]."""
    columns: Columns | None = None
    """[known], ascending; None: all are known, in their order."""
    num_columns: int = 0
    """Columns of the whole row; unused where all are known."""
    digest: RowDigest | None = None
    """The source of the columns, unless all are known."""
    summed: Row | None = None
    """Logits of the known columns that are none of the digest's likely ones, as the device has them in its sums."""
    largest_left: float = -math.inf
    """No unknown column has a larger logit."""

    @classmethod
    def of(cls, digest: RowDigest, num_columns: int) -> KnownRow:
        """The part of a row of `num_columns` columns that `digest` tells."""
        columns = np.concatenate((digest.likely, digest.best, digest.asked))
        columns, places = np.unique(columns, return_index=True)
        logits = np.concatenate((digest.likely_logits, digest.best_logits, digest.asked_logits))[places]
        if len(columns) == num_columns:
            return cls(logits)
        largest_left = float(digest.likely_logits.min()) if len(digest.likely) else math.inf
        return cls(logits, columns, num_columns, digest, logits[places >= len(digest.likely)], largest_left)

    @property
    def log_total(self) -> float:
        """Logarithm of the sum of exp(logit) over all columns."""
        if self.digest is not None:
            return float(self.digest.winner_logit) - self.digest.log_probability
        largest = self.logits.max()
        return float(largest + np.log(np.exp(self.logits - largest).sum()))

    def extended(self, number: int) -> KnownRow:
        """A copy with `number` columns more, all known, whose logits are minus infinity."""
        logits = np.concatenate((self.logits, np.full(number, -np.inf, dtype=np.float32)))
        if self.columns is None:
            return KnownRow(logits)
        end = self.num_columns + number
        return replace(
            self,
            logits=logits,
            columns=np.concatenate((self.columns, np.arange(self.num_columns, end))),
            num_columns=end,
        )

    def place(self, column: int) -> int:
        """The place of a known column in `logits`."""
        return column if self.columns is None else int(np.searchsorted(self.columns, column))

    def known(self, changes: Changes) -> Changes:
        """The changes of known columns, by their places among them."""
        if self.columns is None:
            return changes
        biased, has_bias = self._places(changes.biased)
        written, is_written = self._places(changes.written)
        return Changes(
            biased=biased,
            biases=changes.biases[has_bias],
            penalized=self._places(changes.penalized)[0],
            written=written,
            reductions=changes.reductions[is_written],
        )

    def knows(self, columns: Columns) -> bool:
        """Whether all of these are known."""
        return self.columns is None or bool(self._places(columns)[1].all())

    def column_at(self, place: int) -> int:
        """The column of `logits[place]`."""
        return place if self.columns is None else int(self.columns[place])

    def _places(self, columns: Columns) -> tuple[Columns, Mask]:
        """The places of those of `columns` that are known, and which of them are."""
        assert self.columns is not None
        places = np.searchsorted(self.columns, columns)
        is_known = self.columns[np.minimum(places, len(self.columns) - 1)] == columns
        return places[is_known], is_known


@dataclass(frozen=True, slots=True)
class Kept:
    """A known row after bias, penalties, temperature and filters."""

    row: Row
    """[known] processed logits; of a whole row valid until the next one is processed."""
    possible: Columns | None = None
    """Places in `row` of the columns that filters may keep, ascending; None: all."""
    sure: Mask | None = None
    """[known]: whether filters keep the column, whatever the unknown columns are; None: all that are possible."""
    largest_left: float = -math.inf
    """No unknown column has a larger processed logit."""
    is_closed: bool = True
    """Whether no unknown column is kept."""


def keep(distribution: Distribution, processor: LogitsProcessor, known: KnownRow, changes: Changes) -> Kept | None:
    """Process `known`; None where too little is known. `processor`: that of `distribution`; `changes`: of the row."""
    is_filtered = processor.has_filters and distribution.temperature > 0  # no filter changes an argmax
    if known.columns is None:
        row = processor.shaped(known.logits, changes)
        return Kept(row, processor.filtered(row) if is_filtered else None)
    if changes.size and not known.knows(processor.raised(changes)):
        return None  # an unknown column may be the best one now
    known_changes = known.known(changes)
    row = processor.shaped(known.logits, known_changes)
    left = float(known.largest_left / processor.divisor)
    if not is_filtered:
        return Kept(row, largest_left=left, is_closed=False)
    has_top_k = 0 < distribution.top_k < known.num_columns
    if has_top_k and (row > left).sum() >= distribution.top_k:
        return Kept(row, processor.filtered(row))
    if not row.max() > left:
        return None
    sure = possible = np.ones(len(row), dtype=np.bool_)
    is_closed = False
    if has_top_k:
        sure = row > left  # fewer than `top_k`
    if distribution.top_p < 1:
        assert known.digest is not None
        bounds = _bounds(processor, known, float(row.max()), changes.size - known_changes.size)
        winner = np.float32(known.digest.winner_logit / processor.divisor)
        by_sum, possible, is_closed = _by_sum(distribution.top_p, row, sure, winner, bounds, left)
        sure = sure & by_sum
    if distribution.min_p > 0:
        least = processor.least(row)
        sure, possible, is_closed = sure & (row >= least), possible & (row >= least), is_closed or bool(least > left)
    return Kept(row, np.flatnonzero(possible), sure, left, is_closed)


def _by_sum(
    top_p: float, row: Row, counted: Mask, winner: np.float32, bounds: Sequence[_Bounds], left: float
) -> tuple[Mask, Mask, bool]:
    """`sure`, `possible` and `is_closed` of what top-p keeps of a processed `row`.

    `counted`: the columns that are in its total at least; `bounds`: see `_bounds`.
    """
    (least_rest, most_rest), (least_from, most_from), (least_above, most_above) = bounds
    order = np.argsort(-row, kind="stable")
    values = row[order]
    weights = np.exp(values - values[0])
    before = np.cumsum(weights, dtype=np.float64) - weights
    is_above = values > left
    above = weights[is_above].sum(dtype=np.float64)
    total = weights[counted[order]].sum(dtype=np.float64) + (least_rest if counted.all() else 0.0)
    wanted_least = top_p * total * (1 - _ORDER_MARGIN)
    wanted_most = top_p * (weights.sum(dtype=np.float64) + most_rest) * (1 + _ORDER_MARGIN)
    cases = (is_above, values > winner, values == winner)
    least = np.select(cases, (0.0, 0.0, least_above), least_from)
    most = np.select(cases, (0.0, most_above, most_from), most_rest)
    sure, possible = np.empty((2, len(row)), dtype=np.bool_)
    sure[order] = before + most < wanted_least
    possible[order] = before + least < wanted_most
    return sure, possible, bool(above >= wanted_most)


def _bounds(processor: LogitsProcessor, known: KnownRow, best: float, num_lowered: int) -> list[_Bounds]:
    """Return bounds on the total weight of the unknown columns, relative to the largest processed logit, `best`.

    Three pairs of the least and the most: for all unknown columns, for those whose logit is at least the winner's, and
    for those whose logit is larger than the winner's. These logits are those before bias and penalties.
    `num_lowered`: unknown columns whose logits may have become smaller.
    """
    digest, divisor = known.digest, processor.divisor
    assert digest is not None
    assert known.summed is not None
    largest = float(digest.likely_logits[0] / divisor)
    summed, winner = known.summed / divisor, digest.winner_logit / divisor
    weights = np.exp(summed.astype(np.float64) - largest)
    lowered = num_lowered * math.exp(float(known.largest_left / divisor) - largest)
    factor = math.exp(min(largest - best, _LARGEST))

    def bounded(total: float, own: npt.NDArray[np.float64]) -> _Bounds:
        margin = _SUM_MARGIN * total + _LOST_WEIGHT * known.num_columns
        rest = total - float(own.sum())
        return max(0.0, rest - margin - lowered) * factor, max(0.0, rest + margin) * factor

    masks = (np.ones(len(summed), dtype=np.bool_), summed >= winner, summed > winner)
    return [bounded(total, weights[mask]) for total, mask in zip(digest.rests, masks, strict=True)]
