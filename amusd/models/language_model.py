"""The narrow interface between decoding and a model: one forward pass over a cache that can be cut back.

A model behind this interface knows nothing of epochs, candidates, messages or sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.errors import NotFiniteError


class LogitsDigest(Protocol):
    """The part of a row's logits that a GPU sends to the host: work of a fixed shape at the end of a captured pass."""

    num_inputs: int
    """int64 words per row that the host writes before the pass."""
    num_outputs: int
    """int32 words per row that the host reads after the pass."""

    def compute(self, logits: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, columns] and [rows, num_inputs] -> the columns chosen [rows], and [rows, num_outputs].

        Never waits for the device: the host reads no value, and no shape depends on one.
        """
        ...


@dataclass(frozen=True, slots=True)
class DigestRequest:
    """The digest that one pass is to compute."""

    digest: LogitsDigest
    inputs: npt.NDArray[np.int64]
    """[rows, digest.num_inputs]."""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Result of one forward pass over `rows` tokens."""

    logits: Tensor
    """[rows, vocab] float32 (or the model's own dtype): row i holds the scores of the token after input token i."""
    digests: npt.NDArray[np.int32] | None = None
    """[rows, words]: the outputs of the wanted digest; None where logits are on the host."""
    columns: npt.NDArray[np.int64] | None = None
    """[rows]: those that a captured pass has chosen."""
    largest: npt.NDArray[np.float64] | None = None
    """[rows]: the logits of `columns`; None where they did not come with the pass."""

    def last_row(self) -> ModelOutput:
        """The same of the last row alone."""
        return ModelOutput(
            logits=self.logits[-1:],
            digests=None if self.digests is None else self.digests[-1:],
            columns=None if self.columns is None else self.columns[-1:],
            largest=None if self.largest is None else self.largest[-1:],
        )

    def choose(self) -> list[int]:
        """The column of the highest logit of each row; of equal ones the first.

        Where a captured pass has chosen it, also with a digest, no logit leaves the device. Raises `NotFiniteError`
        where the highest logit is NaN or infinite.
        """
        if self.columns is None or self.largest is None:
            return argmax_rows(self.logits)
        check_finite(self.largest)
        result: list[int] = self.columns.tolist()
        return result


class KVCache(Protocol):
    """Keys and values of the positions `[0, length)` of one sequence, addressed by position.

    A pass writes at `[length, length + rows)` and moves `length`; `truncate` moves it back. Nothing beyond `length` is
    ever read, so truncation copies and frees nothing.
    """

    length: int
    """Positions held."""
    capacity: int
    """Positions that fit."""

    def truncate(self, length: int) -> None:
        """Keep `[0, length)`. O(1). Raises `ValueError` unless `0 <= length <= self.length`; then nothing changes."""
        ...

    def wipe(self) -> None:
        """Write zeros beyond `length`. Masked values are multiplied by zero, so a NaN there would spread."""
        ...


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The rows of one sequence in a pass: the arguments of `LanguageModel.forward`."""

    token_ids: Sequence[int]
    cache: KVCache
    wanted: DigestRequest | None = None
    parents: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """Features of the positions `[start, end)` of a sequence: a part of `LanguageModel.read_features`."""

    cache: KVCache
    start: int
    end: int
    columns: slice
    """Those of one drafter."""


class Chooser(Protocol):
    """A way to choose tokens from logits other than taking the largest."""

    @property
    def digest(self) -> LogitsDigest | None:
        """The digest that it reads of logits on a GPU; None: whole rows."""
        ...

    @property
    def follows_digest(self) -> bool:
        """Whether the column that the digest chooses is nearly always the one that `choose` returns."""
        ...

    def inputs(self, start: int, token_ids: Sequence[int], num_steps: int = 1) -> npt.NDArray[np.int64]:
        """The inputs [rows, words] of `digest`: one row for each of `token_ids`, whose first is at position `start`.

        `num_steps - 1` more rows follow, for the single tokens that a replay takes in after them.
        """
        ...

    def choose(
        self, logits: Tensor, start: int, token_ids: Sequence[int], outputs: npt.NDArray[np.int32] | None = None
    ) -> list[int]:
        """[rows, columns] -> the column chosen for each row. Row i follows `token_ids[i]`, which is at `start + i`.

        `outputs`: of the digest.
        """
        ...


@dataclass(frozen=True, slots=True)
class ChainRows:
    """The end of one chain that goes on: a part of `LanguageModel.extend_batch`."""

    token_ids: Sequence[int]
    cache: KVCache
    num_tokens: int
    chooser: Chooser | None = None


@runtime_checkable
class LanguageModel(Protocol):
    """A causal language model on one device.

    One pass takes in tokens of one sequence, or of several whose caches share their memory (`new_caches`). Those of a
    sequence are a chain, or, with `parents`, several paths that share their first token.
    """

    vocab_size: int
    """Columns of the logits. Without `output_ids`, token ids are in `[0, vocab_size)`."""
    output_ids: Tensor | None
    """[vocab_size] int64: column `j` of the logits scores token `output_ids[j]`; None: token `j` itself."""
    max_length: int
    """Longest sequence the model supports, in tokens."""
    captured_on: torch.device | None
    """The device whose passes are captured and end with digests; None: logits are on the host."""
    feature_columns: Mapping[str, slice]
    """The columns of each drafter's feature, by its name; empty where no drafter reads any."""
    tokens_per_step: int
    """Tokens that `extend_batch` makes at once: 1, or as many at most as a device makes without the host."""
    width: int
    """Most rows of one pass."""
    prefill_chunk: int
    """Prompt tokens of one pass at most; chunks end at its multiples."""

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for sequences of at most `capacity` tokens."""
        ...

    def new_caches(self, number: int, capacity: int) -> Sequence[KVCache]:
        """Empty caches that share their memory, so that one pass may take in tokens of several."""
        ...

    def prepare(self, cache: KVCache, digests: Sequence[LogitsDigest | None] = (None,), steps: int = 1) -> None:
        """Do now what would make the first passes over `cache` slow.

        `digests`: those that passes will want (None: nothing, or the most likely tokens). `steps`: tokens that such a
        pass chooses at most.
        """
        ...

    def prefill(self, token_ids: Sequence[int], cache: KVCache) -> None:
        """Take in tokens whose logits nobody needs, in chunks whose borders depend on the position alone."""
        ...

    def max_rows(self, start: int) -> int:
        """Most tokens of one path in a pass when `cache.length == start` (at least 1)."""
        ...

    def num_tracks(self, start: int) -> int:
        """Tracks (`verification.Tracks`) of a pass when `cache.length == start`; 1: no room for a second path."""
        ...

    def forward(
        self,
        token_ids: Sequence[int],
        cache: KVCache,
        wanted: DigestRequest | None = None,
        parents: Sequence[int] | None = None,
    ) -> ModelOutput:
        """One pass over tokens whose first is at position `cache.length`; returns logits [rows, vocab].

        Without `parents`: 1 to `max_rows(cache.length)` tokens, each behind the one before; `cache.length` moves by
        them.

        `parents` [rows - 1]: the row before each row but the first. There are up to `width` rows, no path has more than
        `max_rows(cache.length)`, and `num_tracks(cache.length)` hold them all. Each row's logits are those of its path
        alone, bit for bit where these do not depend on the block. `cache.length` stays until `keep`.

        On a GPU the digests that are `wanted` come with the logits. Raises `ValueError` on too many rows, an id out of
        range, or a full cache; the cache is then unchanged.
        """
        ...

    def forward_batch(self, batch: Sequence[SequenceRows]) -> Sequence[ModelOutput]:
        """One pass over the rows of several sequences, whose caches share their memory; each as of `forward`.

        The bits of a row do not depend on the other sequences where they do not depend on the block. A sequence
        without `wanted` may get the digest of another one, of inputs that are zeros; its tokens must then be the most
        likely ones (`ModelOutput.choose`). Raises `ValueError` as `forward` does, before any change.
        """
        ...

    def keep(self, rows: Sequence[int], cache: KVCache) -> None:
        """Continue with `rows` of the last pass, a path from the first row; `cache.length` moves by them.

        Raises `ValueError` unless the last pass over `cache` was one with `parents`.
        """
        ...

    def read_features(self, batch: Sequence[FeatureRows]) -> Sequence[Tensor]:
        """The features of positions that caches hold: bfloat16 [rows, width] on the host; in one copy from a GPU."""
        ...

    def extend_batch(self, batch: Sequence[ChainRows]) -> Sequence[Sequence[int]]:
        """Take in the rows of each sequence, then choose `num_tokens` tokens one after another; returns those of each.

        Each token is the most likely one, or what `chooser` chooses from logits, which leave the device for it. The
        caches share their memory, so that one pass serves all.

        The last token stays outside the cache, whose length grows by `len(token_ids) + num_tokens - 1`. Raises
        `ValueError` as `forward` does, and `NotFiniteError` as `ModelOutput.choose` does; the caches are longer then.
        """
        ...


def argmax_rows(logits: Tensor) -> list[int]:
    """[rows, vocab] -> the column of each row's largest value.

    A NaN counts as the largest. Raises `NotFiniteError` where the largest value is NaN or infinite.
    On a CPU through numpy: for 8 rows of 49,152 bfloat16 numbers 0.1 ms, against 1.5 ms of `torch.argmax`.
    """
    if logits.device.type == "cpu" and logits.dtype in (torch.float16, torch.bfloat16, torch.float32):
        rows = logits.float().numpy()
        columns = rows.argmax(axis=-1)
        check_finite(rows[np.arange(len(rows)), columns])
    else:
        largest, found = logits.max(dim=-1)  # the first of equal ones, as its documentation promises
        check_finite(largest.double().cpu().numpy())
        columns = found.cpu().numpy()
    result: list[int] = columns.tolist()
    return result


def check_finite(largest: npt.NDArray[np.floating]) -> None:
    """Raise `NotFiniteError` unless the largest logits of some rows are finite numbers."""
    finite = np.isfinite(largest)
    if not finite.all():
        raise NotFiniteError(f"the largest logit is {largest[~finite][0]}")
