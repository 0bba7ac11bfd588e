"""The rows of logits of one pass, as far as the host has to see them."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from amusd.errors import NotFiniteError
from amusd.sampling.digest import Digest, RowDigest, Words
from amusd.sampling.logits import Row


class PassRows:
    """Digests of rows if the device has computed them, and whole rows where these are asked for."""

    def __init__(self, logits: Tensor, digest: Digest | None, outputs: Words | None) -> None:
        """`outputs`: of `digest`; None: whole rows are seen."""
        self._logits = logits
        self._digest = digest
        self._outputs = outputs
        self._digests: dict[int, RowDigest] = {}
        self._whole: dict[int, Row] = {}

    def digest(self, row: int) -> RowDigest | None:
        """Of a row that was not asked for as a whole. Raises `NotFiniteError` as `whole` does."""
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
        """Under the softmax of the logits."""
        digest = self.digest(row)
        if digest is None:
            return log_probability(self.whole(row), column)
        return digest.log_probability + digest.logit_of(column) - float(digest.winner_logit)


def check_largest(logit: np.float32) -> None:
    """Raise `NotFiniteError` unless the largest logit of a row is a finite number. NaN is larger than any."""
    if not math.isfinite(logit):
        raise NotFiniteError(f"the largest logit is {logit}")


def log_probability(row: Row, column: int) -> float:
    """Of a column under the softmax of `row` [columns]."""
    exact = row.astype(np.float64)
    largest = exact.max()
    return float(exact[column] - largest - np.log(np.exp(exact - largest).sum()))
