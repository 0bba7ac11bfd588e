"""A tiny exact model: the scores of the next token are a hash of the whole prefix.

Whatever goes wrong with a cache or a rollback shows in the next token, because no two prefixes share a distribution.
The tokenizer beside it gives every id one character.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from amusd.models.numerics import Numerics
from amusd.models.passes import ModelOutput, Rows
from amusd.protocol.verification import place_rows
from amusd.sampling.sampler import RowSampler, SamplingState

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15


class TableCache:
    """The prefix itself, as one running hash per position. Stands for a `KVCache`."""

    history = None

    def __init__(self, capacity: int, seed: int, spare: int = 0) -> None:
        self.capacity = capacity
        self.length = 0
        self._hashes = [_mix(seed)] + [0] * (capacity + spare)  # by slot
        self.rows: tuple[int, ...] = ()
        """Hashes of the rows of the last pass over several paths."""

    def truncate(self, length: int) -> None:
        """Keep `[0, length)`. Raises `ValueError` unless `0 <= length <= self.length`; then nothing changes."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of length {self.length} to {length}")
        self.length = length

    def feature(self, position: int) -> Tensor:
        """bfloat16 [4]: bytes of the hash of the prefix that ends at `position`."""
        prefix = self._hashes[position + 1]
        return torch.tensor([float(prefix >> shift & 0x7F) for shift in (0, 8, 16, 24)], dtype=torch.bfloat16)

    def append(self, token_id: int) -> int:
        """Take in one token; returns the hash of the prefix that ends with it."""
        self.length += 1
        return self.write(token_id, self.length - 1, self.length - 2)

    def write(self, token_id: int, slot: int, before: int) -> int:
        """Take in one token at `slot`, after the one at slot `before`, -1 for none; returns the hash as `append`."""
        self._hashes[slot + 1] = prefix = _mix(self._hashes[before + 1] + token_id + 1)
        return prefix


class TableModel:
    """A `ModelRunner` in float64 on the CPU whose logits are exact and never tie."""

    output_ids: Tensor | None = None
    tokens_per_step = 1

    def __init__(
        self,
        vocab_size: int,
        seed: int = 0,
        max_length: int = 512,
        *,
        numerics: Numerics | None = None,
        reads_features: Sequence[str] = (),
    ) -> None:
        """Models with the same `vocab_size` and `seed` are equal. `numerics`: see `ModelRunner`; None: no limits.

        `reads_features`: drafters that read features, which are four small numbers of each prefix's hash.
        """
        self.vocab_size = self.num_ids = vocab_size
        self._seed = seed
        self.max_length = max_length
        self.numerics = numerics or Numerics(max_length, fixed=False, has_borders=False, prefill_chunk=max_length)
        self.feature_columns = {name: slice(0, 4) for name in reads_features}
        self._columns = torch.arange(vocab_size)

    def sampling_state(self, cache: TableCache) -> tuple[SamplingState, int]:
        """A state of the sequence's own."""
        return SamplingState(self.vocab_size, self.output_ids), 0

    def prepare(self, cache: TableCache, samplers: Sequence[RowSampler] = (), steps: int = 1) -> None:
        """Nothing makes its first passes slow."""

    def new_cache(self, capacity: int, *, spare: int = 0) -> TableCache:
        """One of `new_caches`."""
        return self.new_caches(1, capacity, spare=spare)[0]

    def new_caches(self, number: int, capacity: int, *, spare: int = 0) -> list[TableCache]:
        """Empty caches for at most `capacity` tokens. Raises `ValueError` beyond `max_length`."""
        if not 1 <= capacity <= self.max_length:
            raise ValueError(f"a cache of {capacity} tokens: must be between 1 and {self.max_length}")
        return [TableCache(capacity, self._seed, spare) for _ in range(number)]

    def prefill(self, token_ids: Sequence[int], cache: TableCache) -> None:
        """Take in tokens. Raises `ValueError` as `run` does."""
        self._check(token_ids, cache)
        for token_id in token_ids:
            cache.append(token_id)

    def run(self, batch: Sequence[Rows], steps: int = 1) -> list[ModelOutput]:
        """Logits [rows, vocab] float64 of each sequence alone; see `ModelRunner`."""
        outputs = []
        for rows in batch:
            hashes = self._hashes(rows)
            for _ in range(steps - 1):
                last, _ = ModelOutput(self._scores(hashes), rows.wanted).sample(len(hashes) - 1)
                hashes.append(rows.cache.append(last))
            outputs.append(ModelOutput(self._scores(hashes), rows.wanted))
        return outputs

    def keep(self, rows: Sequence[int], cache: TableCache) -> None:
        """Continue with these rows of the last pass over several paths."""
        for row in rows:
            cache.append(cache.rows[row])

    def wipe(self, cache: TableCache) -> None:
        """Nothing: no hash is ever multiplied."""

    def read_features(self, batch: Sequence[tuple[TableCache, range]]) -> list[Tensor]:
        """The features of each sequence alone."""
        return [torch.stack([cache.feature(position) for position in positions]) for cache, positions in batch]

    def _hashes(self, rows: Rows) -> list[int]:
        """The hash of each row's prefix."""
        token_ids, parents, cache = rows.token_ids, rows.parents, rows.cache
        if (tree := rows.paths) is not None:
            paths = [[-1, *tree.prefix.tolist()[-1:], *branch] for branch in tree.branches]
            return [cache.write(token_id, path[-1], path[-2]) for token_id, path in zip(token_ids, paths, strict=True)]
        start, is_chain = cache.length, parents is None
        most = self.numerics.max_rows(start) if is_chain else self.numerics.width
        if not 1 <= len(token_ids) <= most:
            raise ValueError(f"{len(token_ids)} tokens at {start}: at most {most}")
        if is_chain:
            self._check(token_ids, cache)
            return [cache.append(token_id) for token_id in token_ids]
        depth = max(depth for depth, _ in place_rows(parents, self.numerics.tracks_at(start)))
        if depth >= self.numerics.max_rows(start):
            raise ValueError(f"a path of {depth + 1} rows at {start}")
        paths, hashes = [list(token_ids[:1])], []
        for row, parent in enumerate(parents, start=1):
            paths.append([*paths[parent], token_ids[row]])
        for path in paths:
            self._check(path, cache)
            hashes.append([cache.append(token_id) for token_id in path][-1])
            cache.truncate(start)
        cache.rows = tuple(token_ids)
        return hashes

    def _scores(self, hashes: list[int]) -> Tensor:
        """[rows, vocab] float64 in [0, 8): 32 hashed bits, then the column itself, so that no two are equal."""
        prefix = torch.tensor([[_signed(value)] for value in hashes], dtype=torch.int64)
        mixed = (prefix ^ (self._columns * _signed(_ODD))) * _signed(_ODD | 1)
        mixed = (mixed ^ (mixed >> 29)) * _signed(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> 32)) & 0xFFFFFFFF
        return (mixed * (1 << 16) + self._columns).to(torch.float64) * 2.0**-45

    def _check(self, token_ids: Sequence[int], cache: TableCache) -> None:
        if cache.length + len(token_ids) > cache.capacity:
            raise ValueError(f"{len(token_ids)} tokens do not fit: {cache.length} of {cache.capacity} are used")
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise ValueError(f"token ids must be in [0, {self.vocab_size}), not {min(token_ids)} to {max(token_ids)}")


class TableTokenizer:
    """One character per token id: a, b, c ... Satisfies `Tokenizer`."""

    def __init__(self, vocab_size: int, eos_token_id: int | None = None) -> None:
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
        further = (chr(0x4E00 + i) for i in range(vocab_size - len(letters)))
        self._characters = [*letters, *further][:vocab_size]
        self._ids = {character: index for index, character in enumerate(self._characters)}
        self._eos = frozenset(() if eos_token_id is None else (eos_token_id,))

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end an answer; `decode` leaves them out."""
        return self._eos

    @property
    def fingerprint(self) -> str:
        """Sha256 over the alphabet."""
        return hashlib.sha256(f"{self._characters}".encode()).hexdigest()

    def encode(self, text: str, max_length: int | None = None) -> list[int]:
        """One id per character; a character outside the alphabet gets an id by its code point."""
        text.encode()
        return [self._ids.get(character, ord(character) % len(self._characters)) for character in text]

    def encode_chat(self, turns: Sequence[Mapping[str, Any]], *_options: Any) -> list[int]:
        """As `encode` of all contents: there is no template."""
        return self.encode("".join(turn["content"] for turn in turns))

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of `token_ids`, end-of-sequence tokens left out."""
        return "".join(self._characters[token_id] for token_id in token_ids if token_id not in self._eos)

    def token_text(self, token_id: int) -> bytes | str:
        """The character of one id, or the name of an end-of-sequence token."""
        return f"<{token_id}>" if token_id in self._eos else self._characters[token_id].encode()


def _mix(value: int) -> int:
    """The finaliser of splitmix64.

    References: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    value = (value + _ODD) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - (1 << 64) if value >> 63 else value
