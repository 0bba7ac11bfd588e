"""A cache addressed by position: written in place, read as a view, cut back in O(1).

Who owns what, per layer, in a tensor [1, heads, allocated, head_dim], by position:

    [0, length)                 the sequence; never changes until it is truncated
    [length, length + rows)     written by the pass that is running, the rows of padding included
    [.., num_keys)              handed to attention; what lies beyond a row's own position is masked
    [num_keys, allocated)       not read

The place of a position is its *slot*. Both are equal, unless a pass over several paths went another way (`keep`).

Masked positions are multiplied by zero, not skipped, so they must be finite: memory starts as zeros, and later holds
only keys and values of truncated or dummy rows. `wipe` writes zeros again after a pass that was not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache


class PreallocatedCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Keys and values of one sequence. Satisfies `KVCache`, and transformers as `past_key_values`.

    Layers are allocated once, at their first write, because only the model knows their shapes.
    """

    def __init__(self, *, capacity: int, allocated: int, dtype: torch.dtype, spare: int = 0) -> None:
        """`capacity`: tokens that fit; `allocated`: positions of memory (padding included); `dtype`: as stored.

        `spare`: how many of these positions are for nodes of a tree.
        """
        if not 0 < capacity <= allocated:
            raise ValueError(f"capacity={capacity} must be at least 1 and at most allocated={allocated}")
        super().__init__(layers=[])
        self.dtype = dtype
        self.allocated = allocated
        self.spare = spare
        self.slots = np.arange(allocated)
        """[allocated] int64: the slot of each position. Do not write to it."""
        self.path_slots: Sequence[int] = ()
        """Slots of the rows of the last pass over paths; empty after another pass, `keep` or a rollback."""
        self._capacity = capacity
        self._length = 0
        self._num_keys = 0
        self.slots_of_pass: Tensor | None = None
        """[rows] int64, on the device: where the running pass writes; None: from `length` on."""
        self._memory: dict[tuple[int, str], Tensor] = {}
        """[heads, allocated, dim] of each layer: "keys" and "values", or "joint", the keys' heads first."""
        self._views: dict[int, tuple[Tensor, Tensor]] = {}  # of joint memory, for `_num_keys`

    @property
    def length(self) -> int:
        """Positions held."""
        return self._length

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self._capacity

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far: nothing before the first pass."""
        return sum(storage.nbytes for storage in self._memory.values())

    def truncate(self, length: int) -> None:
        """Keep `[0, length)`. O(1). Raises `ValueError` unless `0 <= length <= self.length`; then nothing changes."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot truncate a cache of length {self._length} to {length}")
        if length < self._length:
            self.path_slots = ()
        self._length = length
        if length == 0:
            self.slots[:] = np.arange(self.allocated)

    def wipe(self) -> None:
        """Write zeros beyond `length`, where a pass has left what is no number."""
        with torch.inference_mode():  # in which passes write
            for storage in self._memory.values():
                storage.index_fill_(1, torch.from_numpy(self.slots[self._length :]).to(storage.device), 0)

    def begin(self, rows: int, num_keys: int, slots: Tensor | None = None) -> None:
        """Announce a pass that computes `rows` rows and attends to `[0, num_keys)`.

        `slots` [rows] int64, on the cache's device: where the rows are written, instead of from `length` on.
        """
        if max(self._length + rows, num_keys) > self.allocated:
            raise ValueError(f"{rows} rows at {self._length} and {num_keys} keys exceed {self.allocated} positions")
        if num_keys != self._num_keys:
            self._views.clear()
        self._num_keys = num_keys
        self.slots_of_pass = slots

    def advance(self, rows: int) -> None:
        """The pass is done; its first `rows` rows are real."""
        if self._length + rows > self._capacity:
            raise ValueError(f"{rows} rows at {self._length} exceed the capacity of {self._capacity}")
        self.path_slots = ()
        self._length += rows

    def keep(self, rows: Sequence[int]) -> None:
        """Continue the sequence with these rows of the last pass over paths, in this order.

        They move to the slots of their positions, each of which is the row's own or one that no row of `rows` holds.
        Raises `ValueError` unless the last pass was one over paths and the rows fit.
        """
        self.check_keep(rows)
        slots = [self.path_slots[row] for row in rows]
        moves = [(slot, position) for position, slot in enumerate(slots, start=self._length) if slot != position]
        if moves:
            with torch.inference_mode():  # in which passes write
                sources, targets = torch.tensor(moves).unbind(1)
                for storage in self._memory.values():
                    storage.index_copy_(1, targets, storage.index_select(1, sources))
        self.advance(len(rows))

    def check_keep(self, rows: Sequence[int]) -> None:
        """Raise `ValueError` unless the last pass was one over paths and these rows fit."""
        if not self.path_slots:
            raise ValueError("the last pass was not one over paths")
        if self._length + len(rows) > self._capacity:
            raise ValueError(f"{len(rows)} rows at {self._length} exceed the capacity of {self._capacity}")

    def is_in_order(self, length: int) -> bool:
        """Whether the first `length` positions are their own slots."""
        return bool((self.slots[:length] == np.arange(length)).all())

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [1, heads, rows, dim] at the slots of the pass; return views [1, heads, num_keys, dim].

        The interface of transformers.
        """
        keys = self._write((layer_idx, "keys"), key_states[0])
        values = self._write((layer_idx, "values"), value_states[0])
        return keys[:, : self._num_keys].unsqueeze(0), values[:, : self._num_keys].unsqueeze(0)

    def update_joint(self, key_values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write keys and values [rows, 2 * heads, dim], the keys' heads first; return views [heads, num_keys, dim]."""
        self._write((layer_idx, "joint"), key_values.transpose(0, 1))
        return self.views(layer_idx)

    def joint(self, layer_idx: int, num_heads: int, head_dim: int, device: torch.device) -> Tensor:
        """The memory [num_heads, allocated, head_dim] of a layer's keys and values, which the caller writes."""
        return self._storage((layer_idx, "joint"), num_heads, head_dim, device)

    def views(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values [heads, num_keys, dim] of the running pass in a layer's joint memory."""
        views = self._views.get(layer_idx)
        if views is None:
            keys, values = self._memory[layer_idx, "joint"][:, : self._num_keys].chunk(2, dim=0)
            views = self._views[layer_idx] = (keys, values)
        return views

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the signature is transformers'
        """Positions held, by transformers' name."""
        return self._length

    def get_query_offset(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the signature is transformers'
        """Position of the first row of the running pass, by transformers' name."""
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG002 - transformers'
        """Number of keys that attention reads, and the position of the first."""
        return self._num_keys, 0

    def _write(self, part: tuple[int, str], states: Tensor) -> Tensor:
        """Write [heads, rows, dim] at the slots of the pass; returns the memory."""
        heads, rows, dim = states.shape
        storage = self._storage(part, heads, dim, states.device)
        if self.slots_of_pass is None:
            storage.narrow(1, self._length, rows).copy_(states)
        else:
            storage.index_copy_(1, self.slots_of_pass, states.to(self.dtype))
        return storage

    def _storage(self, part: tuple[int, str], num_heads: int, dim: int, device: torch.device) -> Tensor:
        storage = self._memory.get(part)
        if storage is None:  # only the model knows its shape
            storage = torch.zeros((num_heads, self.allocated, dim), dtype=self.dtype, device=device)
            self._memory[part] = storage
        return storage
