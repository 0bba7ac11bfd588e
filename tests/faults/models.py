"""A target whose next token is a hash of the whole prefix, and drafters that know it as often as they are told to.

Nothing here computes anything: a pass and a step take virtual time alone. What a token was drafted from is kept as the
64-bit hash of that prefix, the ghost, which never travels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from amusd.drafters.base import ChainDrafter, Drafter
from amusd.models.numerics import Numerics
from amusd.models.passes import Rows
from amusd.protocol import prefix_hash
from amusd.protocol.draft_session import Guesses, Node, Transition

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


@dataclass(frozen=True)
class ChangingTracks(Numerics):
    def tracks_at(self, start: int) -> int:
        return 1 + start % 4


class HashModel:
    vocab_size = VOCAB_SIZE
    output_ids = None
    captured_on = None
    feature_columns: ClassVar[dict[str, slice]] = {}
    tokens_per_step = 1

    def __init__(self, max_length: int, spend: Spend) -> None:
        self.max_length = max_length
        self._spend = spend
        self.numerics = ChangingTracks(9, fixed=False, border=None, prefill_chunk=CHUNK)

    def new_caches(self, number: int, capacity: int) -> list[HashCache]:
        return [HashCache(capacity) for _ in range(number)]

    def prepare(self, cache: HashCache, samplers: object = ()) -> None:
        pass

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
    """In [0, 1), the same for the same prefix: what a drafter proposes depends on its context alone."""
    return (prefix_hash.extend(prefix ^ (purpose << 32), purpose) >> 11) % (1 << 20) / (1 << 20)


def guess(prefix: int, quality: float, life: int) -> int:
    """The target's own token with probability `quality`; each life of a draft errs in its own way."""
    right, own = next_token(prefix), prefix ^ (life << 24)
    return right if _dice(own, 1) < quality else (right + 1 + own % (VOCAB_SIZE - 1)) % VOCAB_SIZE


class HashChainDrafter(ChainDrafter):
    """Right with probability `quality`, and says nothing with probability `silence`."""

    def __init__(self, spend: Spend, quality: float, silence: float, life: int) -> None:
        self._spend = spend
        self._quality = quality
        self._silence = silence
        self._life = life
        self._hashes = [prefix_hash.EMPTY]
        self.drafted_from: dict[int, int] = {}

    @property
    def length(self) -> int:
        return len(self._hashes) - 1

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        self._hashes = hashes_of(token_ids)
        self.drafted_from = {}
        self._spend("prefill")

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        self._spend("step")
        proposed: list[int] = []
        while len(proposed) < max_tokens and _dice(self._hashes[-1], 2) >= self._silence:
            self.drafted_from[self.length] = self._hashes[-1]
            proposed.append(guess(self._hashes[-1], self._quality, self._life))
            self.commit(proposed[-1:])
        return tuple(proposed)

    def commit(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._hashes.append(prefix_hash.extend(self._hashes[-1], token_id))

    def truncate(self, length: int) -> None:
        self._spend("truncate")
        del self._hashes[length + 1 :]

    def close(self) -> None:
        self._hashes = [prefix_hash.EMPTY]

    def ghosts(self, root: Node, nodes: Sequence[Node]) -> frozenset[Ghost]:
        return frozenset((self.drafted_from[node.position], node.token_id) for node in nodes)


class HashTreeDrafter(Drafter):
    """Has the target's token among its guesses, and first, with probability `quality`."""

    WEIGHTS = (0.7, 0.2, 0.06)

    def __init__(self, spend: Spend, quality: float, silence: float, life: int) -> None:
        self._spend = spend
        self._quality = quality
        self._silence = silence
        self._life = life
        self._fan_out = 1
        self._length = 0
        self._context = prefix_hash.EMPTY
        self._hashes: dict[Node, int] = {}
        """Of each node that was offered or computed: of the prefix up to and with it, when that was first asked."""

    @property
    def length(self) -> int:
        return self._length

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        self._length = len(token_ids)
        self._fan_out = min(fan_out, len(self.WEIGHTS))
        self._context = hashes_of(token_ids)[-1]
        self._hashes = {}
        self._spend("prefill")

    def expand(self, root: Node, nodes: Sequence[Node], num_tokens: int = 1) -> list[Guesses]:
        self._spend("step")
        return [self._guesses(self.hash_of(root, node)) for node in nodes]

    def follow(self, transition: Transition) -> None:
        self._spend("follow")
        self._length = transition.committed_length
        for token_id in (*(node.token_id for node in transition.kept), *transition.token_ids):
            self._context = prefix_hash.extend(self._context, token_id)

    def look_up(self) -> tuple[tuple[int, ...], float]:
        if _dice(self._context, 3) < 0.5:
            return (), 0.0
        value, found = self._context, []
        for _ in range(3):
            found.append(guess(value, self._quality, self._life))
            value = prefix_hash.extend(value, found[-1])
        return tuple(found), 0.85

    def close(self) -> None:
        self._hashes = {}

    def hash_of(self, root: Node, node: Node) -> int:
        """Of the prefix up to and with it. A node's prefix never changes: what it was at first is its ghost."""
        known = self._hashes.get(node)
        if known is None:
            above = node.parent
            if node is root:
                known = self._context
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
        right, own = next_token(prefix), prefix ^ (self._life << 24)
        others = [token_id for token_id in range(VOCAB_SIZE) if token_id != right]
        first = own % len(others)
        guesses = (others[first:] + others[:first])[: self._fan_out]
        guesses.insert(0 if _dice(own, 1) < self._quality else self._fan_out - int(_dice(own, 4) < 0.5), right)
        return list(zip(guesses[: self._fan_out], self.WEIGHTS, strict=False))
