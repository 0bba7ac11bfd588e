"""The acceptance rules: which candidates of a block are kept, and which token replaces the first other one.

Equality (greedy decoding and matching): a candidate is accepted when it is the target's own choice.

Ratio test: a candidate is kept with probability min(1, p / q), else a token is drawn from the excess of p over q. p is
the target's distribution, q the one that the candidate was drawn from. The token is then distributed as p, under four
conditions (docs/sampling.md). q travels with its token, as a row of the tokens that could be drawn:

    n int32   token ids, ascending
    n float32 their probabilities, which sum to 1

References: Leviathan, Kalman, Matias 2023, https://arxiv.org/abs/2211.17192; Chen et al. 2023,
https://arxiv.org/abs/2302.01318
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_ID, _PROBABILITY = np.dtype("<i4"), np.dtype("<f4")
_ENTRY_BYTES = _ID.itemsize + _PROBABILITY.itemsize
_SUM_TOLERANCE = 1e-3


# Equality


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The tokens that a verification commits."""

    token_ids: tuple[int, ...]
    """The accepted candidates, then the target's recovered or bonus token if any."""
    num_accepted: int


def accept_along(
    choose: Callable[[int], int], next_row: Callable[[int, int], int | None], num_rows: int
) -> tuple[Acceptance, tuple[int, ...]]:
    """Follow the target's choices from row 0 through equal candidates; also returns the rows followed.

    `choose(row)`: the target's choice after that row of the pass, which has `num_rows`. `next_row(row, token_id)`: the
    row of the candidate `token_id` after `row`, or None; `num_rows` for one that came too late for the pass.
    """
    token_ids: list[int] = []
    rows = [0]
    while rows[-1] < num_rows:
        token_ids.append(choose(rows[-1]))
        row = next_row(rows[-1], token_ids[-1])
        if row is None:
            break
        rows.append(row)
    return Acceptance(tuple(token_ids), len(rows) - 1), tuple(row for row in rows if row < num_rows)


# The ratio test


@dataclass(frozen=True, slots=True)
class ProbabilityRow:
    """A distribution over n tokens, whose ids ascend."""

    token_ids: npt.NDArray[Any]
    probabilities: npt.NDArray[np.float32]

    def of(self, token_id: int) -> float:
        """The probability of a token; 0 outside the support."""
        index = int(np.searchsorted(self.token_ids, token_id))
        found = index < len(self.token_ids) and int(self.token_ids[index]) == token_id
        return float(self.probabilities[index]) if found else 0.0


def pack_row(row: ProbabilityRow) -> bytes:
    """The bytes of a row."""
    return row.token_ids.astype(_ID).tobytes() + row.probabilities.astype(_PROBABILITY).tobytes()


def certain(token_id: int) -> bytes:
    """The row of a token that was not drawn, such as a looked-up one."""
    return pack_row(ProbabilityRow(np.array([token_id], dtype=np.int32), np.array([1.0], dtype=np.float32)))


def unpack_rows(rows: Sequence[bytes], token_ids: Sequence[int], vocab_size: int) -> tuple[ProbabilityRow, ...]:
    """The row of each token. Raises `ValueError`."""
    return tuple(unpack_row(row, token_id, vocab_size) for row, token_id in zip(rows, token_ids, strict=True))


def unpack_row(data: bytes, token_id: int, vocab_size: int) -> ProbabilityRow:
    """The row that `token_id` was drawn from. Raises `ValueError` for an impossible one."""
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
