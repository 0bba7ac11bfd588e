"""The interface between decoding and a model, which knows nothing of candidates, messages or sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.errors import NotFiniteError
from amusd.models.kv_cache import KVCache
from amusd.models.numerics import Numerics
from amusd.models.passes import Rows, Sampler, SamplerRows


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The result of a pass for one sequence."""

    logits: Tensor
    """[rows, vocab]: row i scores the token after input i.

    Captured passes leave them on the device, valid until the next pass.
    """
    wanted: SamplerRows | None = None
    """None: the most likely tokens."""
    columns: npt.NDArray[np.int64] | None = None
    """[rows], then one per further step: chosen by a captured pass; None: not chosen yet."""
    largest: npt.NDArray[np.float64] | None = None
    """[rows]: the logits of `columns`."""
    outputs: npt.NDArray[np.int32] | None = None
    """[rows, words]: other outputs of the sampler."""

    def choose(self) -> list[int]:
        """Column of each row's highest logit, the first of equal ones; or that chosen in a captured pass.

        Raises `NotFiniteError` where the logit is NaN or infinite.
        """
        if self.columns is None or self.largest is None:
            return argmax_rows(self.logits)
        check_finite(self.largest)
        result: list[int] = self.columns.tolist()
        return result

    def sample(self, row: int) -> tuple[int, npt.NDArray[np.int32]]:
        """The column sampled for one row, and the sampler's other outputs. Raises as `choose`."""
        nothing = np.empty(0, dtype=np.int32)
        if self.columns is not None and self.largest is not None:
            check_finite(self.largest[row])
            return int(self.columns[row]), nothing if self.outputs is None else self.outputs[row]
        if self.wanted is None:
            return argmax_rows(self.logits[row : row + 1])[0], nothing
        logits = self.logits[row].float().numpy()
        check_finite(logits.max())
        return self.wanted.sampler.of_row(logits, self.wanted.inputs[row])


@runtime_checkable
class LanguageModel(Protocol):
    """A causal language model on one device."""

    vocab_size: int
    """Columns of the logits. Without `output_ids`, token ids are in `[0, vocab_size)`."""
    output_ids: Tensor | None
    """[vocab_size] int64: token of each column of the logits; None: the column itself."""
    max_length: int
    numerics: Numerics
    """The rule for rows, path lengths and paths of a pass."""
    captured_on: torch.device | None
    """Device whose passes are captured and end with a sampler; None: logits are on the host."""
    feature_columns: Mapping[str, slice]
    tokens_per_step: int
    """Most steps of a pass: 1, or as many as a device makes without the host."""

    def new_caches(self, number: int, capacity: int) -> Sequence[KVCache]:
        """Empty caches for sequences of at most `capacity` tokens, which share their memory.

        Raises `ValueError` beyond `max_length`.
        """
        ...

    def prepare(self, cache: KVCache, samplers: Sequence[Sampler] = (), steps: int = 1) -> None:
        """Do slow first-time work for passes over the memory of `cache`.

        `samplers`: of later passes. `steps`: most of a pass.
        """
        ...

    def prefill(self, token_ids: Sequence[int], cache: KVCache) -> None:
        """Take in tokens without logits, in chunks whose borders depend on the position alone."""
        ...

    def run(self, batch: Sequence[Rows], steps: int = 1) -> Sequence[ModelOutput]:
        """One pass over rows of several sequences, whose caches share their memory.

        A chain has 1 to `numerics.max_rows(cache.length)` tokens, the first at position `cache.length`, which moves by
        them. With `steps` each goes on with the token chosen after its last row while its cache has room; the last one
        stays outside. Rows with `parents` are up to `numerics.width`, on `numerics.tracks_at(cache.length)` tracks; the
        length stays until `keep`. Nodes of trees are up to `numerics.width`; the length does not matter.

        A row's logits are those of its path alone. Raises `ValueError`, before any change, for what does not fit.
        """
        ...

    def keep(self, rows: Sequence[int], cache: KVCache) -> None:
        """Continue with `rows` of the last pass, a path from the first row; moves `cache.length`.

        Raises `ValueError` unless the last pass over `cache` had `parents`.
        """
        ...

    def read_features(self, batch: Sequence[tuple[KVCache, range]]) -> Sequence[Tensor]:
        """The features of positions that caches hold, those of every drafter side by side.

        bfloat16 [rows, width] on the host; in one copy from a GPU.
        """
        ...


def argmax_rows(logits: Tensor) -> list[int]:
    """[rows, vocab] -> the column of each row's largest value.

    Raises `NotFiniteError` where that is NaN or infinite. On a CPU numpy takes 0.1 ms for 8 rows of 49,152 bfloat16
    numbers, `torch.argmax` 1.5 ms.
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
    """Raise `NotFiniteError` unless these largest logits are finite."""
    largest = np.atleast_1d(largest)
    finite = np.isfinite(largest)
    if not finite.all():
        raise NotFiniteError(f"the largest logit is {largest[~finite][0]}")
