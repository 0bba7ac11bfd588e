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


class Sampler(Protocol):
    """The end of a pass, which chooses from logits: work of a fixed shape, captured with the pass on a GPU."""

    @property
    def level(self) -> int:
        """Rows of a sampler of a lower level, with neutral further inputs, may share a pass with this one's."""
        ...

    @property
    def num_inputs(self) -> int:
        """int64 words per row that the host writes before the pass."""
        ...

    @property
    def neutral(self) -> npt.NDArray[np.int64]:
        """[num_inputs]: the inputs of a row that wants the largest logit."""
        ...

    @property
    def num_outputs(self) -> int:
        """int32 words per row that the host reads after the pass."""
        ...

    def compute(self, logits: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, columns] and [rows, num_inputs] -> the columns chosen [rows], and [rows, num_outputs].

        On a GPU it never waits: the host reads no value, and no shape depends on one.
        """
        ...

    def of_row(self, row: npt.NDArray[np.float32], words: npt.NDArray[np.int64]) -> tuple[int, npt.NDArray[np.int32]]:
        """The same of one row on a CPU, whose largest logit is a finite number: the column, and [num_outputs]."""
        ...


@dataclass(frozen=True, slots=True)
class SamplerRows:
    """What a sampler is to do with the rows of one sequence."""

    sampler: Sampler
    inputs: npt.NDArray[np.int64]
    """[rows, sampler.num_inputs]."""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """Result of one forward pass over `rows` tokens."""

    logits: Tensor
    """[rows, vocab] float32 (or the model's own dtype): row i holds the scores of the token after input token i."""
    columns: npt.NDArray[np.int64] | None = None
    """[rows]: those that a captured pass has chosen; None: nothing was sampled yet."""
    largest: npt.NDArray[np.float64] | None = None
    """[rows]: the logits of `columns`."""
    outputs: npt.NDArray[np.int32] | None = None
    """[rows, words]: further outputs of the sampler."""

    def choose(self) -> list[int]:
        """The column of the highest logit of each row; of equal ones the first.

        A captured pass has chosen them already. Raises `NotFiniteError` where the logit is NaN or infinite.
        """
        if self.columns is None or self.largest is None:
            return argmax_rows(self.logits)
        check_finite(self.largest)
        result: list[int] = self.columns.tolist()
        return result

    def sample(self, row: int, wanted: SamplerRows | None) -> tuple[int, npt.NDArray[np.int32]]:
        """The column that was wanted of one row, and the sampler's further outputs. Raises as `choose`."""
        nothing = np.empty(0, dtype=np.int32)
        if self.columns is not None and self.largest is not None:
            check_finite(self.largest[row : row + 1])
            return int(self.columns[row]), nothing if self.outputs is None else self.outputs[row]
        if wanted is None:
            return argmax_rows(self.logits[row : row + 1])[0], nothing
        logits = self.logits[row].float().numpy()
        check_finite(logits.max())
        return wanted.sampler.of_row(logits, wanted.inputs[row])


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
    wanted: SamplerRows | None = None
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
    """A way to choose the tokens of a chain other than taking the largest logits."""

    @property
    def sampler(self) -> Sampler:
        """What chooses at the end of a pass."""
        ...

    @property
    def can_replay(self) -> bool:
        """Whether it can choose several tokens without the host."""
        ...

    draws: bool
    """Whether `draw` chooses each token behind a pass, not the sampler."""

    def rows(
        self, start: int, token_ids: Sequence[int], parents: Sequence[int] | None = None, num_steps: int = 1
    ) -> npt.NDArray[np.int64]:
        """The inputs [rows, words] of `sampler`: one row for each of `token_ids`, whose first is at position `start`.

        `num_steps - 1` more rows follow, for the single tokens that a replay takes in after them.
        """
        ...

    def draw(self, logits: Tensor, words: npt.NDArray[np.int64]) -> int:
        """[1, columns] and [1, words] -> the column drawn, if it `draws`."""
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
    """The device whose passes are captured and end with a sampler; None: logits are on the host."""
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

    def prepare(self, cache: KVCache, samplers: Sequence[Sampler] = (), steps: int = 1) -> None:
        """Do now what would make the first passes over `cache` slow.

        `samplers`: those that passes will want. `steps`: tokens that such a pass chooses at most.
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
        wanted: SamplerRows | None = None,
        parents: Sequence[int] | None = None,
    ) -> ModelOutput:
        """One pass over tokens whose first is at position `cache.length`; returns logits [rows, vocab].

        Without `parents`: 1 to `max_rows(cache.length)` tokens, each behind the one before; `cache.length` moves by
        them.

        `parents` [rows - 1]: the row before each row but the first. There are up to `width` rows, no path has more than
        `max_rows(cache.length)`, and `num_tracks(cache.length)` hold them all. Each row's logits are those of its path
        alone, bit for bit where these do not depend on the block. `cache.length` stays until `keep`.

        On a GPU the columns that are `wanted` come with the logits. Raises `ValueError` on too many rows, an id out of
        range, or a full cache; the cache is then unchanged.
        """
        ...

    def forward_batch(self, batch: Sequence[SequenceRows]) -> Sequence[ModelOutput]:
        """One pass over the rows of several sequences, whose caches share their memory; each as of `forward`.

        The bits of a row do not depend on the other sequences where they do not depend on the block. Raises
        `ValueError` as `forward` does, before any change.
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

        Each token is the most likely one, or what `chooser` chooses. The caches share their memory, so that one pass
        serves all.

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


def check_finite(largest: npt.ArrayLike) -> None:
    """Raise `NotFiniteError` unless the largest logits of some rows are finite numbers."""
    largest = np.atleast_1d(largest)
    finite = np.isfinite(largest)
    if not finite.all():
        raise NotFiniteError(f"the largest logit is {largest[~finite][0]}")
