"""A 64-bit rolling hash of a token prefix, so that a candidate can prove which prefix it was drafted from.

Not a defence against an adversary: it detects our own mistakes. One multiplication and one addition per token, the same
number on every machine.
"""

from __future__ import annotations

EMPTY = 0xCBF29CE484222325
"""Hash of the empty prefix."""

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def extend(prefix_hash: int, token_id: int) -> int:
    """Hash of the prefix with `token_id` appended."""
    mixed = ((prefix_hash ^ (token_id + 1)) * _MULTIPLIER) & _MASK
    return mixed ^ (mixed >> 29)
