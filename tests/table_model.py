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

from amusd.models.language_model import (
    ChainRows,
    FeatureRows,
    KVCache,
    ModelOutput,
    Sampler,
    SamplerRows,
    SequenceRows,
)
from amusd.models.numerics import Numerics
from amusd.protocol.verification import place_rows

_MASK = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15


class TableCache:
    """The prefix itself, as one running hash per position. Satisfies `KVCache`."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._hashes = [_mix(seed)] + [0] * capacity
        self.rows: tuple[int, ...] = ()
        """Hashes of the rows of the last pass over several paths."""

    def truncate(self, length: int) -> None:
        """Keep `[0, length)`. Raises `ValueError` unless `0 <= length <= self.length`; then nothing changes."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of length {self.length} to {length}")
        self.length = length

    def wipe(self) -> None:
        """Nothing: no hash is ever multiplied."""

    def feature(self, position: int) -> Tensor:
        """bfloat16 [4]: bytes of the hash of the prefix that ends at `position`."""
        prefix = self._hashes[position + 1]
        return torch.tensor([float(prefix >> shift & 0x7F) for shift in (0, 8, 16, 24)], dtype=torch.bfloat16)

    def append(self, token_id: int) -> int:
        """Take in one token; returns the hash of the prefix that ends with it."""
        prefix = _mix(self._hashes[self.length] + token_id + 1)
        self.length += 1
        self._hashes[self.length] = prefix
        return prefix


class TableModel:
    """A `LanguageModel` in float64 on the CPU whose logits are exact and never tie."""

    output_ids: Tensor | None = None
    captured_on: torch.device | None = None
    tokens_per_step = 1

    def __init__(
        self,
        vocab_size: int,
        seed: int = 0,
        max_length: int = 512,
        *,
        numerics: Numerics | None = None,
        num_tracks: int = 1,
        reads_features: Sequence[str] = (),
    ) -> None:
        """Models with the same `vocab_size` and `seed` are equal. `numerics` limits the rows of a pass, if given.

        `num_tracks`: of a pass over several paths. `reads_features`: drafters that read features, which are four
        small numbers of each prefix's hash.
        """
        if not 2 <= vocab_size <= 1 << 16:
            raise ValueError(f"vocab_size={vocab_size} must be between 2 and 65536")
        self.vocab_size = vocab_size
        self._seed = seed
        self.max_length = max_length
        self._numerics = numerics
        self.prefill_chunk = numerics.prefill_chunk if numerics else max_length
        self.width = numerics.width if numerics else max_length
        self._num_tracks = num_tracks
        self.feature_columns = {name: slice(0, 4) for name in reads_features}
        self._columns = torch.arange(vocab_size)

    def prepare(self, cache: KVCache, samplers: Sequence[Sampler] = (), steps: int = 1) -> None:
        """Nothing makes its first passes slow."""

    def new_cache(self, capacity: int) -> TableCache:
        """An empty cache for at most `capacity` tokens. Raises `ValueError` beyond `max_length`."""
        if not 1 <= capacity <= self.max_length:
            raise ValueError(f"a cache of {capacity} tokens: must be between 1 and {self.max_length}")
        return TableCache(capacity, self._seed)

    def new_caches(self, number: int, capacity: int) -> list[TableCache]:
        """Caches as of `new_cache`."""
        return [self.new_cache(capacity) for _ in range(number)]

    def max_rows(self, start: int) -> int:
        """How many tokens one `forward` may carry at position `start`."""
        return self._numerics.max_rows(start) if self._numerics else self.max_length

    def prefill(self, token_ids: Sequence[int], cache: KVCache) -> None:
        """Take in tokens. Raises `ValueError` as `forward` does."""
        table = self._checked(token_ids, cache)
        for token_id in token_ids:
            table.append(token_id)

    def forward(
        self,
        token_ids: Sequence[int],
        cache: KVCache,
        wanted: SamplerRows | None = None,
        parents: Sequence[int] | None = None,
    ) -> ModelOutput:
        """Logits [rows, vocab] float64 of `token_ids`; see `LanguageModel.forward`."""
        if parents is not None:
            return ModelOutput(logits=self._scores(self._hash_paths(token_ids, parents, cache)))
        table = self._checked(token_ids, cache)
        if not 1 <= len(token_ids) <= self.max_rows(cache.length):
            raise ValueError(f"{len(token_ids)} tokens at {cache.length}: at most {self.max_rows(cache.length)}")
        return ModelOutput(logits=self._scores([table.append(token_id) for token_id in token_ids]))

    def forward_batch(self, batch: Sequence[SequenceRows]) -> list[ModelOutput]:
        """The outputs of each sequence alone."""
        return [self.forward(rows.token_ids, rows.cache, rows.wanted, rows.parents) for rows in batch]

    def num_tracks(self, start: int) -> int:
        """See `LanguageModel`."""
        return self._num_tracks

    def keep(self, rows: Sequence[int], cache: KVCache) -> None:
        """Continue with these rows of the last pass over several paths."""
        table = self._checked((), cache)
        for row in rows:
            table.append(table.rows[row])

    def read_features(self, batch: Sequence[FeatureRows]) -> list[Tensor]:
        """The features of each sequence alone."""
        return [
            torch.stack([self._checked((), rows.cache).feature(position) for position in range(rows.start, rows.end)])
            for rows in batch
        ]

    def extend_batch(self, batch: Sequence[ChainRows]) -> list[list[int]]:
        """The tokens of each sequence alone."""
        return [self._extend(rows) for rows in batch]

    def _extend(self, rows: ChainRows) -> list[int]:
        chosen: list[int] = []
        pending = rows.token_ids
        while len(chosen) < rows.num_tokens:
            words = None if rows.chooser is None else rows.chooser.rows(rows.cache.length, pending)
            output = self.forward(pending, rows.cache)
            columns = [output.sample(len(pending) - 1, None)[0]]  # raises for what is no number
            if rows.chooser is not None and words is not None:
                columns = [rows.chooser.draw(output.logits[-1:], words[-1:])]
            chosen += columns if self.output_ids is None else self.output_ids[columns].tolist()
            pending = chosen[-1:]
        return chosen

    def _hash_paths(self, token_ids: Sequence[int], parents: Sequence[int], cache: KVCache) -> list[int]:
        """The hash of each row's prefix in a pass over several paths."""
        table, start = self._checked((), cache), cache.length
        if not len(parents) + 1 == len(token_ids) <= self.width:
            raise ValueError(f"{len(token_ids)} rows with {len(parents)} parents: allowed are 1 to {self.width} rows")
        depth = max(depth for depth, _ in place_rows(parents, self.num_tracks(start)))
        if depth >= self.max_rows(start):
            raise ValueError(f"a path of {depth + 1} rows: at most {self.max_rows(start)} from position {start}")
        paths, hashes = [list(token_ids[:1])], []
        for row, parent in enumerate(parents, start=1):
            paths.append([*paths[parent], token_ids[row]])
        for path in paths:
            self._checked(path, cache)
            hashes.append([table.append(token_id) for token_id in path][-1])
            table.truncate(start)
        table.rows = tuple(token_ids)
        return hashes

    def _scores(self, hashes: list[int]) -> Tensor:
        """[rows, vocab] float64 in [0, 8): 32 hashed bits, then the column itself, so that no two are equal."""
        prefix = torch.tensor([[_signed(value)] for value in hashes], dtype=torch.int64)
        mixed = (prefix ^ (self._columns * _signed(_ODD))) * _signed(_ODD | 1)
        mixed = (mixed ^ (mixed >> 29)) * _signed(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> 32)) & 0xFFFFFFFF
        return (mixed * (1 << 16) + self._columns).to(torch.float64) * 2.0**-45

    def _checked(self, token_ids: Sequence[int], cache: KVCache) -> TableCache:
        if not isinstance(cache, TableCache):
            raise TypeError(f"a cache of new_cache() is needed, not a {type(cache).__name__}")
        if cache.length + len(token_ids) > cache.capacity:
            raise ValueError(f"{len(token_ids)} tokens do not fit: {cache.length} of {cache.capacity} are used")
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise ValueError(f"token ids must be in [0, {self.vocab_size}), not {min(token_ids)} to {max(token_ids)}")
        return cache


class TableTokenizer:
    """One character per token id: a, b, c ... Satisfies `Tokenizer`."""

    def __init__(self, vocab_size: int, eos_token_id: int | None = None) -> None:
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
        self._characters = [
            letters[i] if i < len(letters) else chr(0x4E00 + i - len(letters)) for i in range(vocab_size)
        ]
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

    def encode(self, text: str) -> list[int]:
        """One id per character; a character outside the alphabet gets an id by its code point."""
        return [self._ids.get(character, ord(character) % len(self._characters)) for character in text]

    def encode_chat(self, turns: Sequence[Mapping[str, Any]], **_options: Any) -> list[int]:
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
