"""A target whose next token is a hash of the whole prefix, and drafters that know it with a given probability.

No model is computed: passes and steps take virtual time alone. Each drafted token has a ghost, the 64-bit hash of the
prefix that it was drafted from; ghosts are in no message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from amusd.drafters.base import Drafter
from amusd.models.numerics import Numerics
from amusd.models.passes import Rows
from amusd.protocol import prefix_hash
from amusd.protocol.draft_tree import Guesses, Node, Transition
from amusd.protocol.verification import place_rows

VOCAB_SIZE = 7
CHUNK = 2

Ghost = tuple[int, int]
Spend = Callable[[str], None]
"""Take the time that an action of this name takes; it may be the last one."""


def next_token(prefix: int) -> int:
    return (prefix >> 7) % VOCAB_SIZE


def text_of(prompt: Sequence[int], max_length: int) -> tuple[int, ...]:
    hashes = hashes_of(prompt)
    tokens = list(prompt)
    while len(tokens) < max_length:
        tokens.append(next_token(hashes[-1]))
        hashes.append(prefix_hash.extend(hashes[-1], tokens[-1]))
    return tuple(tokens)


def hashes_of(token_ids: Sequence[int]) -> list[int]:
    hashes = [prefix_hash.EMPTY]
    for token_id in token_ids:
        hashes.append(prefix_hash.extend(hashes[-1], token_id))
    return hashes


class HashCache:
    history = None

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.hashes = [prefix_hash.EMPTY]
        self.rows: list[int] = []

    @property
    def length(self) -> int:
        return len(self.hashes) - 1

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length
        del self.hashes[length + 1 :]


@dataclass(frozen=True)
class HashOutput:
    choices: list[int]

    def choose(self) -> list[int]:
        return self.choices

    def sample(self, row: int) -> tuple[int, None]:
        return self.choices[row], None


@dataclass(frozen=True)
class ChangingTracks(Numerics):
    def tracks_at(self, start: int) -> int:
        return 1 + start % 4


class HashModel:
    vocab_size = VOCAB_SIZE
    output_ids = None
    feature_columns: ClassVar[dict[str, slice]] = {}
    tokens_per_step = 1

    def __init__(self, max_length: int, spend: Spend) -> None:
        self.max_length = max_length
        self._spend = spend
        self.numerics = ChangingTracks(9, fixed=False, has_borders=False, prefill_chunk=CHUNK)

    def new_caches(self, number: int, capacity: int) -> list[HashCache]:
        return [HashCache(capacity) for _ in range(number)]

    def prefill(self, token_ids: Sequence[int], cache: HashCache) -> None:
        self._append(token_ids, cache)
        self._spend("prefill")

    def run(self, batch: Sequence[Rows]) -> list[HashOutput]:
        self._spend("pass")
        return [HashOutput(self._choices(rows.token_ids, rows.cache, rows.parents)) for rows in batch]

    def _choices(self, token_ids: Sequence[int], cache: Any, parents: Sequence[int] | None) -> list[int]:
        if parents is None:
            return self._append(token_ids, cache)
        assert len(token_ids) <= self.numerics.width
        place_rows(parents, self.numerics.tracks_at(cache.length))
        cache.rows = [prefix_hash.extend(cache.hashes[-1], token_ids[0])]
        for token_id, parent in zip(token_ids[1:], parents, strict=True):
            cache.rows.append(prefix_hash.extend(cache.rows[parent], token_id))
        return [next_token(value) for value in cache.rows]

    def keep(self, rows: Sequence[int], cache: HashCache) -> None:
        cache.hashes += [cache.rows[row] for row in rows]

    def _append(self, token_ids: Sequence[int], cache: HashCache) -> list[int]:
        assert cache.length + len(token_ids) <= cache.capacity
        for token_id in token_ids:
            cache.hashes.append(prefix_hash.extend(cache.hashes[-1], token_id))
        return [next_token(value) for value in cache.hashes[len(cache.hashes) - len(token_ids) :]]


def _dice(prefix: int, purpose: int) -> float:
    """A number in [0, 1) that depends on the prefix alone, as a drafter's proposals do."""
    return (prefix_hash.extend(prefix ^ (purpose << 32), purpose) >> 11) % (1 << 20) / (1 << 20)


def guess(prefix: int, quality: float, incarnation: int) -> int:
    """The target's token with probability `quality`; each incarnation of a draft makes other mistakes."""
    right, own = next_token(prefix), prefix ^ (incarnation << 24)
    return right if _dice(own, 1) < quality else (right + 1 + own % (VOCAB_SIZE - 1)) % VOCAB_SIZE


class HashDrafter(Drafter):
    """Guesses the target's token, as the first one with probability `quality`; sometimes it guesses nothing."""

    WEIGHTS = (0.7, 0.2, 0.06)

    def __init__(self, spend: Spend, quality: float, silence: float, incarnation: int) -> None:
        self._spend = spend
        self._quality = quality
        self._silence = silence
        self._incarnation = incarnation
        self._hashes: dict[Node, int] = {}
        """Hash of the prefix that ends with each offered or computed node, as it was first asked for."""

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        super().open(token_ids, capacity, min(fan_out, len(self.WEIGHTS)))
        self._hashes = {}
        self._spend("prefill")

    def expand(self, root: Node, nodes: Sequence[Node], room: int = 1) -> Sequence[Guesses]:
        self._spend("step")
        if self.fan_out > 1:
            return [self._guesses(self.hash_of(root, node)) for node in nodes]
        return super().expand(root, nodes, min(room, 3))

    def propose(self, path: Sequence[int], room: int) -> Sequence[int]:
        value, found = hashes_of([*self.committed, *path])[-1], []
        while len(found) < room and _dice(value, 2) >= self._silence:
            found.append(guess(value, self._quality, self._incarnation))
            value = prefix_hash.extend(value, found[-1])
        return found

    def follow(self, transition: Transition) -> None:
        self._spend("follow")
        super().follow(transition)

    def look_up(self) -> tuple[Sequence[int], float]:
        if self.fan_out == 1 or _dice(hashes_of(self.committed)[-1], 3) < 0.5:
            return (), 0.0
        return self.propose((), 3), 0.85

    def hash_of(self, root: Node, node: Node) -> int:
        """Hash of the prefix that ends with `node`. A node's prefix never changes, so the first hash is kept."""
        known = self._hashes.get(node)
        if known is None:
            above = node.parent
            if node is root:
                known = hashes_of(self.committed)[-1]
            else:
                known = prefix_hash.extend(self.hash_of(root, root if above is None else above), node.token_id)
            self._hashes[node] = known
        return known

    def ghosts(self, root: Node, nodes: Sequence[Node]) -> frozenset[Ghost]:
        for node in nodes:
            self.hash_of(root, node)
        return frozenset(
            (self.hash_of(root, root if node.parent is None else node.parent), node.token_id) for node in nodes
        )

    def _guesses(self, prefix: int) -> Guesses:
        if _dice(prefix, 2) < self._silence:
            return ()
        right, own = next_token(prefix), prefix ^ (self._incarnation << 24)
        others = [token_id for token_id in range(VOCAB_SIZE) if token_id != right]
        first = own % len(others)
        guesses = (others[first:] + others[:first])[: self.fan_out]
        guesses.insert(0 if _dice(own, 1) < self._quality else self.fan_out - int(_dice(own, 4) < 0.5), right)
        return list(zip(guesses[: self.fan_out], self.WEIGHTS, strict=False))
