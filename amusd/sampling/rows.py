"""One row of draft probabilities as bytes: the tokens that could be drawn, and how likely each was.

    n int32   token ids, ascending
    n float32 their probabilities, which sum to 1

Whatever the draft's vocabulary and filters, only the support travels. A row belongs to one drawn token and is sent
with it in the same message, so that the two cannot come apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_ID, _PROBABILITY = np.dtype("<i4"), np.dtype("<f4")
_ENTRY_BYTES = _ID.itemsize + _PROBABILITY.itemsize
_SUM_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class ProbabilityRow:
    """A distribution over a few tokens."""

    token_ids: npt.NDArray[Any]
    """[n] of any integer type, ascending."""
    probabilities: npt.NDArray[np.float32]
    """[n]."""

    def of(self, token_id: int) -> float:
        """The probability of a token; 0 outside the support."""
        index = int(np.searchsorted(self.token_ids, token_id))
        found = index < len(self.token_ids) and int(self.token_ids[index]) == token_id
        return float(self.probabilities[index]) if found else 0.0


def pack_row(row: ProbabilityRow) -> bytes:
    """The bytes of a row."""
    return row.token_ids.astype(_ID).tobytes() + row.probabilities.astype(_PROBABILITY).tobytes()


def certain(token_id: int) -> bytes:
    """The row of a token that was not drawn: looked up, or chosen in any way that uses no chance."""
    return pack_row(ProbabilityRow(np.array([token_id], dtype=np.int32), np.array([1.0], dtype=np.float32)))


def unpack_rows(rows: Sequence[bytes], token_ids: Sequence[int], vocab_size: int) -> tuple[ProbabilityRow, ...]:
    """The row of each token. Raises `ValueError`."""
    return tuple(unpack_row(row, token_id, vocab_size) for row, token_id in zip(rows, token_ids, strict=True))


def unpack_row(data: bytes, token_id: int, vocab_size: int) -> ProbabilityRow:
    """The row that `token_id` was drawn from. Raises `ValueError` for what cannot be one: nothing is trusted."""
    number, rest = divmod(len(data), _ENTRY_BYTES)
    if rest or not number:
        raise ValueError(f"a row of {len(data)} bytes")
    token_ids = np.frombuffer(data, dtype=_ID, count=number)
    probabilities = np.frombuffer(data, dtype=_PROBABILITY, offset=number * _ID.itemsize)
    if token_ids[0] < 0 or token_ids[-1] >= vocab_size or (np.diff(token_ids) <= 0).any():
        raise ValueError(f"a row whose ids are not ascending in [0, {vocab_size})")
    total = float(probabilities.sum(dtype=np.float64)) if (probabilities >= 0).all() else float("nan")
    if not abs(total - 1) <= _SUM_TOLERANCE:
        raise ValueError(f"a row of probabilities that sum to {total}")
    row = ProbabilityRow(token_ids, probabilities)
    if row.of(token_id) <= 0:
        raise ValueError(f"a row under which its own token, {token_id}, is impossible")
    return row
