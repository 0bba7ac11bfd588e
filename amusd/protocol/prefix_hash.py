"""A sequence's committed prefix, and the rolling 64-bit hash that says which prefix a candidate follows.

The hash detects mistakes of our own; it is no defence against an adversary.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

EMPTY = 0xCBF29CE484222325

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def extend(prefix_hash: int, token_id: int) -> int:
    """Hash of the prefix with `token_id` appended."""
    mixed = ((prefix_hash ^ (token_id + 1)) * _MULTIPLIER) & _MASK
    return mixed ^ (mixed >> 29)


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix. The loop runs in C, since texts may be long."""
    return operator.indexOf(itertools.chain(map(operator.ne, one, other), (True,)), True)


class CommittedPrefix:
    """Committed tokens, prompt included, and the hash of each prefix."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids: list[int] = []
        """All committed tokens; read-only, since `append` also hashes."""
        self._hashes: list[int] = [EMPTY]
        self.append(token_ids)

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return len(self.token_ids)

    def hash_before(self, position: int) -> int:
        """Rolling hash of `[0, position)`."""
        return self._hashes[position]

    def append(self, token_ids: Sequence[int]) -> None:
        """Make these tokens final."""
        value = self._hashes[-1]
        for token_id in token_ids:
            value = extend(value, token_id)
            self.token_ids.append(token_id)
            self._hashes.append(value)
