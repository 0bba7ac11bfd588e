"""The draft's token stream: a committed prefix that only grows, and a speculative tail that may be cut.

    [0, committed_length)         committed: chosen by the target, never changed again
    [committed_length, length)    tail: drafted, not yet judged

Every position keeps the rolling hash of the prefix that ends there, so that cutting the tail costs no rehashing. A
drafted token and the distribution it was drawn from (its row) are appended and cut together; what a row is, the stream
does not ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from amusd.protocol import prefix_hash

Row = TypeVar("Row")


class TokenStream(Generic[Row]):
    """Tokens of one sequence. Starts with `token_ids` committed."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids: list[int] = []
        self._hashes: list[int] = [prefix_hash.EMPTY]
        self._rows: dict[int, Row] = {}
        self._append(token_ids)
        self._committed_length = len(self._token_ids)

    @property
    def committed_length(self) -> int:
        """Tokens that are final."""
        return self._committed_length

    @property
    def length(self) -> int:
        """All tokens, tail included."""
        return len(self._token_ids)

    @property
    def committed(self) -> tuple[int, ...]:
        """The committed tokens."""
        return tuple(self._token_ids[: self._committed_length])

    @property
    def tail(self) -> tuple[int, ...]:
        """The speculative tokens."""
        return tuple(self._token_ids[self._committed_length :])

    def slice(self, start: int, stop: int) -> tuple[int, ...]:
        """Tokens at `[start, stop)`."""
        return tuple(self._token_ids[start:stop])

    def rows(self, start: int, stop: int) -> tuple[Row, ...]:
        """Rows of the tokens at `[start, stop)`; none at all unless each has one."""
        rows = tuple(self._rows[position] for position in range(start, stop) if position in self._rows)
        return rows if len(rows) == stop - start else ()

    def hash_before(self, position: int) -> int:
        """Rolling hash of `[0, position)`."""
        return self._hashes[position]

    def matching_prefix(self, start: int, token_ids: Sequence[int]) -> int:
        """How many of `token_ids` equal what stands here from `start` on."""
        matched = 0
        for own, other in zip(self._token_ids[start : start + len(token_ids)], token_ids, strict=False):
            if own != other:
                break
            matched += 1
        return matched

    def extend_tail(self, token_ids: Sequence[int], rows: Sequence[Row] = ()) -> None:
        """Append drafted tokens, and their rows where they have any: one each."""
        if rows:
            start = len(self._token_ids)
            self._rows.update(zip(range(start, start + len(token_ids)), rows, strict=True))
        self._append(token_ids)

    def truncate(self, length: int) -> None:
        """Cut the tail to `[committed_length, length)`. Raises `ValueError` rather than touch a committed token."""
        if not self._committed_length <= length <= len(self._token_ids):
            raise ValueError(
                f"cannot cut to {length}: committed {self._committed_length}, length {len(self._token_ids)}"
            )
        for position in range(length, len(self._token_ids)):
            self._rows.pop(position, None)
        del self._token_ids[length:]
        del self._hashes[length + 1 :]

    def commit(self, length: int) -> None:
        """Make `[0, length)` final. Raises `ValueError` unless `committed_length <= length <= self.length`."""
        if not self._committed_length <= length <= len(self._token_ids):
            raise ValueError(
                f"cannot commit {length}: committed {self._committed_length}, length {len(self._token_ids)}"
            )
        for position in range(self._committed_length, length):
            self._rows.pop(position, None)
        self._committed_length = length

    def _append(self, token_ids: Sequence[int]) -> None:
        value = self._hashes[-1]
        for token_id in token_ids:
            value = prefix_hash.extend(value, token_id)
            self._token_ids.append(token_id)
            self._hashes.append(value)
