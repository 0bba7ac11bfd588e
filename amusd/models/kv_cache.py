"""Caches addressed by position: regions of one memory, written in place, read as views, truncated in O(1).

A cache owns the slots [first, first + allocated) of a memory and holds one sequence, by position:

    [0, length)                 the sequence; never changes until it is truncated
    [length, length + rows)     written by the running pass
    [.., num_keys)              read by attention; masked beyond a row's own position
    [num_keys, allocated)       not read

A position's *slot* counts from the start of the region. Slot and position are equal unless `keep` has swapped slots or
a tree has chosen its own. Masked values are multiplied by zero, so they must be finite: `wipe` writes zeros after a
pass with other values. `recurrent.py` has states that cannot be truncated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from amusd.models.recurrent import StateHistory, StatePart
from amusd.sampling.sampler import send

_ALIGNMENT = 64
_FEATURES = (-1, "features")  # stored like a layer's keys and values, so that `move` and `wipe` include them


class KVMemory:
    """Keys and values of several caches. A layer is allocated at its first write."""

    def __init__(self, num_slots: int, dtype: torch.dtype) -> None:
        self.num_slots = num_slots
        self.dtype = dtype
        self._tensors: dict[tuple[int, str], Tensor] = {}
        """[heads, slots, dim] per layer: "keys" and "values", or "joint", keys first; and features."""
        self._views: dict[int, tuple[Tensor, Tensor]] = {}  # of joint tensors

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far: 0 before the first pass."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    @property
    def num_layers(self) -> int:
        """Layers that have written keys and values."""
        return len({layer for layer, _ in self._tensors} - {_FEATURES[0]})

    def wipe(self, slots: Tensor) -> None:
        """Write zeros at `slots` [n] int64, on the host."""
        slots = self._sent(slots)
        with torch.inference_mode():  # in which passes write
            for tensor in self._tensors.values():
                tensor.index_fill_(1, slots, 0)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots `sources` [n] to `targets` [n], both on the host."""
        sources, targets = self._sent(sources), self._sent(targets)
        with torch.inference_mode():  # in which passes write
            for tensor in self._tensors.values():
                tensor.index_copy_(1, targets, tensor.index_select(1, sources))

    def joint(self, layer_idx: int, num_heads: int, head_dim: int, device: torch.device) -> Tensor:
        """[num_heads, slots, head_dim]: a layer's keys and values, which the caller writes."""
        return self._tensor((layer_idx, "joint"), num_heads, head_dim, device)

    def views(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values [heads, slots, dim] of a layer stored joint."""
        if layer_idx not in self._views:
            keys, values = self._tensors[layer_idx, "joint"].chunk(2, dim=0)
            self._views[layer_idx] = (keys, values)
        return self._views[layer_idx]

    def features(self, width: int, device: torch.device) -> Tensor:
        """[slots, width]: features of tokens."""
        return self._tensor(_FEATURES, 1, width, device)[0]

    def write(self, part: tuple[int, str], states: Tensor, slots: range | Tensor) -> Tensor:
        """Write the first rows of `states` [heads, rows, dim] at `slots`; returns the tensor."""
        heads, _, dim = states.shape
        tensor, states = self._tensor(part, heads, dim, states.device), states.narrow(1, 0, len(slots))
        if isinstance(slots, range):
            tensor.narrow(1, slots.start, len(slots)).copy_(states)
        else:
            tensor.index_copy_(1, slots, states.to(self.dtype))
        return tensor

    def _sent(self, slots: Tensor) -> Tensor:
        """Copy `slots` from the host to the tensors' device."""
        return send(slots, next(iter(self._tensors.values()), slots).device)

    def _tensor(self, part: tuple[int, str], num_heads: int, dim: int, device: torch.device) -> Tensor:
        if part not in self._tensors:  # only the model knows its shape
            self._tensors[part] = _zeros((num_heads, self.num_slots, dim), self.dtype, device)
        return self._tensors[part]


class PassMemory(NamedTuple):
    """A memory, and the places that one pass reads and writes."""

    shared: KVMemory
    slots: range | Tensor
    """Slots of the first rows: a range, or [rows] int64 on the device. Further rows are padding and not written."""
    parents: Tensor | None = None
    """[rows] on the device: slot of the token before each row, whose feature a draft's row reads."""
    states: Sequence[StatePart] = ()
    """For recurrent layers: a part for each sequence of the pass."""

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write [heads, rows, dim] at the slots; return the tensors [heads, slots, dim]."""
        write = self.shared.write
        return write((layer_idx, "keys"), keys, self.slots), write((layer_idx, "values"), values, self.slots)

    def update_joint(self, key_values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Write keys and values [rows, 2 * heads, dim], the keys' heads first; return `KVMemory.views`."""
        self.shared.write((layer_idx, "joint"), key_values.transpose(0, 1), self.slots)
        return self.shared.views(layer_idx)

    def write_features(self, rows: Tensor) -> None:
        """Write [rows, width] at the slots."""
        self.shared.write(_FEATURES, rows.unsqueeze(0), self.slots)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    data = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    start = -data.ctypes.data % _ALIGNMENT
    return torch.from_numpy(data[start : start + size]).view(dtype).view(shape)


class KVCache:
    """Keys and values of one sequence: a region of a memory."""

    def __init__(self, memory: KVMemory, *, capacity: int, allocated: int, spare: int = 0, number: int = 0) -> None:
        """`allocated`: slots of the region, padding included; `spare`: slots for nodes of a tree."""
        self.memory = memory
        self.number = number
        self.first = number * allocated
        self.allocated = allocated
        self.spare = spare
        self.slots = np.arange(allocated)
        """[allocated] int64: slot of each position."""
        self.num_in_table = 0
        """Number of positions whose slots the table of captured passes holds."""
        self.path_slots: Sequence[int] = ()
        """Slots of the last pass over paths; empty after another pass, `keep` or a rollback."""
        self.history: StateHistory | None = None
        """States of recurrent layers."""
        self.captured: Any = None
        """The `CapturedPasses` of `memory`."""
        self.capacity = capacity
        self.length = 0

    def truncate(self, length: int) -> None:
        """Keep `[0, length)`. Raises `ValueError` unless `0 <= length <= self.length`."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of length {self.length} to {length}")
        if length < self.length:
            self.path_slots = ()
        self.length = length
        if self.history is not None:
            self.history.truncate(length)

    def go_back(self) -> list[int]:
        """Truncate to the newest state of recurrent layers; returns the tokens after it."""
        if self.history is None:
            return []
        place = self.history.newest(self.length)
        token_ids = self.history.token_ids[place:]
        self.truncate(place)
        return token_ids

    def advance(self, rows: int) -> None:
        """Add `rows` to the length. Raises `ValueError` beyond the capacity."""
        if self.length + rows > self.capacity:
            raise ValueError(f"{rows} rows at {self.length} exceed the capacity of {self.capacity}")
        self.path_slots = ()
        self.length += rows

    def keep(self, rows: Sequence[int]) -> None:
        """Continue the sequence with `rows` of the last pass. Raises `ValueError` unless that pass was over paths.

        With captured passes slots are swapped. Otherwise keys and values are copied to the positions' own slots.
        """
        if not self.path_slots:
            raise ValueError("the last pass was not one over paths")
        kept = [self.path_slots[row] for row in rows]
        moves = [(slot, position) for position, slot in enumerate(kept, start=self.length) if slot != position]
        if self.captured is not None:
            self.num_in_table = min(self.num_in_table, self.length)
            for position, slot in enumerate(kept, start=self.length):
                other = position + int((self.slots[position:] == slot).argmax())
                self.slots[[position, other]] = self.slots[[other, position]]
        elif moves:
            sources, targets = (self.first + torch.tensor(moves)).unbind(1)
            self.memory.move(sources, targets)
        self.advance(len(rows))

    def put_in_order(self) -> None:
        """Move each position to the slot of its number, as prompt chunks require."""
        length, self.length = self.length, 0  # nothing is held if the move is interrupted
        self.num_in_table, self.path_slots = 0, ()
        positions = np.flatnonzero(self.slots[:length] != np.arange(length))
        if len(positions):
            sources, targets = (torch.from_numpy(self.first + part) for part in (self.slots[positions], positions))
            self.memory.move(sources, targets)
        self.slots[:] = np.arange(self.allocated)
        self.length = length
