"""The narrow interface between decoding and a model: one forward pass over a cache that can be cut back.

What a model behind this interface need not know: epochs, candidates, messages, sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class LogitsDigest(Protocol):
    """What of a row's logits comes from a GPU to the host: work of a fixed shape that a captured pass ends with."""

    @property
    def num_inputs(self) -> int:
        """int64 words of a row that the host writes before the pass."""
        ...

    @property
    def num_outputs(self) -> int:
        """int32 words of a row that the host reads behind it."""
        ...

    def compute(self, logits: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, columns] and [rows, num_inputs] -> the columns chosen [rows], and [rows, num_outputs].

        Asks nothing of the device: no value is read by the host, no shape depends on one.
        """
        ...


@dataclass(frozen=True, slots=True)
class DigestRequest:
    """A digest that is wanted of one pass."""

    digest: LogitsDigest
    inputs: npt.NDArray[np.int64]
    """[rows, digest.num_inputs]."""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Result of one forward pass over `rows` tokens."""

    logits: Tensor
    """[rows, vocab] float32 (or the model's own dtype): row i holds the scores of the token after input token i."""
    digests: npt.NDArray[np.int32] | None = None
    """[rows, words]: the outputs of the digest that was asked for; None where logits are on the host."""


class KVCache(Protocol):
    """Keys and values of the positions `[0, length)` of one sequence, addressed by position.

    A forward pass writes at `[length, length + rows)` and moves `length`; `truncate` moves it back. Nothing beyond
    `length` is ever read, so truncation copies and frees nothing.
    """

    @property
    def length(self) -> int:
        """Positions held."""
        ...

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        ...

    def truncate(self, length: int) -> None:
        """Keep `[0, length)`. O(1). Raises `ValueError` unless `0 <= length <= self.length`; then nothing changes."""
        ...

    def wipe(self) -> None:
        """Write zeros beyond `length`: what is masked there is multiplied by zero, which no NaN survives."""
        ...


class Chooser(Protocol):
    """How tokens are chosen from logits, where it is not simply the largest that counts."""

    @property
    def digest(self) -> LogitsDigest | None:
        """What it needs of logits on a GPU; None: whole rows."""
        ...

    @property
    def follows_digest(self) -> bool:
        """Whether the column that the digest chooses is nearly always the one that `choose` returns."""
        ...

    def inputs(self, start: int, token_ids: Sequence[int], num_steps: int = 1) -> npt.NDArray[np.int64]:
        """The inputs [rows, words] of `digest`, a row for each of `token_ids`, which stand from `start` on.

        `num_steps - 1` more rows follow for single tokens that a replay takes in behind them.
        """
        ...

    def choose(
        self, logits: Tensor, start: int, token_ids: Sequence[int], outputs: npt.NDArray[np.int32] | None = None
    ) -> list[int]:
        """[rows, columns] -> the column chosen for each row. Row i stands behind `token_ids[i]`, at `start + i`.

        `outputs`: of the digest.
        """
        ...


@runtime_checkable
class LanguageModel(Protocol):
    """A causal language model on one device."""

    @property
    def vocab_size(self) -> int:
        """Logits have this many columns; without `output_ids`, token ids are in `[0, vocab_size)`."""
        ...

    @property
    def output_ids(self) -> Tensor | None:
        """[vocab_size] int64: column `j` of the logits scores token `output_ids[j]`; None: token `j` itself."""
        ...

    @property
    def max_length(self) -> int:
        """Longest sequence the model supports, in tokens."""
        ...

    @property
    def captured_on(self) -> torch.device | None:
        """The device whose passes are captured and end with digests; None: logits are on the host."""
        ...

    @property
    def tokens_per_step(self) -> int:
        """How many tokens `extend` makes at once: 1, or as many as a device makes without the host."""
        ...

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for sequences of at most `capacity` tokens."""
        ...

    def prepare(self, cache: KVCache, digests: Sequence[LogitsDigest | None] = (None,), steps: int = 1) -> None:
        """Do now what would make the first passes over `cache` slow.

        `digests`: what passes will be asked for (None: nothing, or the most likely tokens); `steps`: how many tokens
        such a pass chooses, 1 or `tokens_per_step`.
        """
        ...

    def prefill(self, token_ids: Sequence[int], cache: KVCache) -> None:
        """Take in tokens whose logits nobody needs, in chunks whose borders depend on the position alone."""
        ...

    def max_rows(self, start: int) -> int:
        """How many tokens one `forward` may carry when `cache.length == start` (at least 1)."""
        ...

    def forward(self, token_ids: Sequence[int], cache: KVCache, wanted: DigestRequest | None = None) -> ModelOutput:
        """One pass over 1 to `max_rows(cache.length)` tokens at positions `[cache.length, cache.length + rows)`.

        Returns logits [rows, vocab], on a GPU with the digests that are `wanted`, and leaves `cache.length` moved by
        `rows`. Raises `ValueError` on too many rows, an id out of range, or a full cache; the cache is then unchanged.
        """
        ...

    def choose(self, token_ids: Sequence[int], cache: KVCache) -> list[int]:
        """`forward`, and for each of its rows the token with the highest logit; of equal ones that of the first column.

        Token ids leave the device, logits do not. Raises `NotFiniteError` where the highest logit is NaN or infinite.
        """
        ...

    def extend(
        self, token_ids: Sequence[int], cache: KVCache, num_tokens: int, chooser: Chooser | None = None
    ) -> list[int]:
        """Take in `token_ids`, then `num_tokens` times the token chosen after what is there; returns those.

        The most likely one, or what `chooser` says; to it logits leave the device.

        The last one stays outside the cache, whose length grows by `len(token_ids) + num_tokens - 1`. Raises
        `ValueError` as `forward` does, and `NotFiniteError` as `choose` does; the cache is longer then.
        """
        ...


@runtime_checkable
class PathModel(LanguageModel, Protocol):
    """One whose passes may hold several paths, for what would be padding of a pass over one."""

    @property
    def width(self) -> int:
        """Rows of one pass at most."""
        ...

    def num_tracks(self, start: int) -> int:
        """How many tracks (`tracks.py`) a `forward_paths` has when `cache.length == start`; 1: it has no room."""
        ...

    def forward_paths(
        self,
        token_ids: Sequence[int],
        parents: Sequence[int],
        cache: KVCache,
        wanted: DigestRequest | None = None,
    ) -> ModelOutput:
        """One pass over up to `width` tokens that form several paths, from the first one at position `cache.length` on.

        `parents` [rows - 1]: the row before each but the first, which comes first. No path has more than
        `max_rows(cache.length)` rows, and `num_tracks` hold them all. Returns logits [rows, vocab], for each row those
        that `forward` over its path alone gives: bit for bit, where those do not depend on the block. `cache.length`
        stays until `keep`. Raises `ValueError` as `forward` does.
        """
        ...

    def choose_paths(self, token_ids: Sequence[int], parents: Sequence[int], cache: KVCache) -> list[int]:
        """`forward_paths`, and for each of its rows the token with the highest logit, as `choose` has it."""
        ...

    def keep(self, rows: Sequence[int], cache: KVCache) -> None:
        """Right after `forward_paths`: these rows, a path from the first, are real; `cache.length` moves by them."""
        ...
