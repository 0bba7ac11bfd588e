"""What a network is given for one pass over nodes of a tree: rows of several paths, each at its own position and slot.

A *slot* is where a token's keys and values lie in a cache; a *position* is how far it stands from the start of its
path, and is rotated into its keys. Tokens of a prompt have slot and position alike. Nodes of different branches may
share a position, never a slot; and a slot stays where it is when its node is committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.models.network import Network
from amusd.protocol.tracks import place_rows

Visible = npt.NDArray[np.bool_]
"""[rows, num_keys]: which slots each row attends to, its own among them."""
NodeInputs = npt.NDArray[np.int64]
"""[3, rows]: token ids, positions and slots."""

_ZERO, _MINUS_INFINITY = np.float32(0), np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class TreeRows:
    """One pass, on the network's device."""

    token_ids: Tensor
    """[rows] int64."""
    positions: Tensor
    """[rows] int64."""
    slots: Tensor
    """[rows] int64."""
    mask: Tensor
    """[1, groups, rows, num_keys]: additive, in the cache's dtype."""


@dataclass(frozen=True, slots=True)
class PathRows:
    """Where the rows of a pass over several paths go; rows of padding, which nobody reads, are the last ones."""

    positions: Sequence[int]
    slots: Sequence[int]
    visible: Visible


def lay_out_paths(
    parents: Sequence[int], *, start: int, num_rows: int, num_keys: int, num_tracks: int, stride: int
) -> PathRows:
    """Rows of paths that share the first one, which stands at `start` behind a prefix in the slots [0, start).

    `parents` [rows - 1]: the row before each but the first; padded to `num_rows`. A row's slot is that of its position,
    plus `stride` times its track (`tracks.py`), of which there are `num_tracks`. Raises `ValueError` where they do not
    suffice, and for a row that comes before its parent.
    """
    places = place_rows(parents, num_tracks)
    positions = [start + depth for depth, _ in places]
    slots = [start + depth + track * stride for depth, track in places]
    paths = [[start]]
    for row, parent in enumerate(parents, start=1):
        paths.append([*paths[parent], slots[row]])
    free = max(positions) + 1
    for slot in range(free, free + num_rows - len(slots)):
        positions.append(start)
        slots.append(slot)
        paths.append([slot])
    visible = np.zeros((num_rows, num_keys), dtype=np.bool_)
    visible[:, :start] = True
    for row, path in enumerate(paths):
        visible[row, path] = True
    return PathRows(positions, slots, visible)


def checked(
    network: Network, token_ids: Sequence[int], nodes: PathRows, *, max_length: int, num_slots: int
) -> NodeInputs:
    """The inputs of one pass of `network`. `max_length`: positions that it knows; `num_slots`: of memory.

    Raises `ValueError` for what no pass over paths can be.
    """
    positions, slots, visible = nodes.positions, nodes.slots, nodes.visible
    if not len(token_ids) == len(positions) == len(slots) == len(visible):
        lengths = (len(token_ids), len(positions), len(slots), len(visible))
        raise ValueError(f"token ids, positions, slots and visible rows must be as many, not {lengths}")
    if visible.dtype != np.bool_ or visible.ndim != 2 or visible.shape[1] > num_slots:
        raise ValueError(f"visible: {visible.dtype} {visible.shape} must be bool [rows, up to {num_slots}]")
    inputs = np.array((token_ids, positions, slots), dtype=np.int64)
    _check(inputs, visible, (network.num_ids, max_length, visible.shape[1]))
    return inputs


def lay_out(network: Network, inputs: NodeInputs, visible: Visible) -> TreeRows:
    """The rows of one pass of `network`, from what `checked` has let pass."""
    rows, num_keys = visible.shape
    groups = network.num_query_groups
    mask = np.empty((1, groups, rows, num_keys), dtype=np.float32)
    mask[:] = np.where(visible, _ZERO, _MINUS_INFINITY)
    token_rows, position_rows, slot_rows = torch.from_numpy(inputs).to(network.device)
    return TreeRows(
        token_ids=token_rows,
        positions=position_rows,
        slots=slot_rows,
        mask=torch.from_numpy(mask).to(network.device, network.cache_dtype),
    )


def _check(inputs: NodeInputs, visible: Visible, limits: tuple[int, int, int]) -> None:
    """`limits`: what token ids, positions and slots must stay below."""
    lowest, highest = inputs.min(axis=1).tolist(), inputs.max(axis=1).tolist()
    for name, low, high, limit in zip(("token ids", "positions", "slots"), lowest, highest, limits, strict=True):
        if low < 0 or high >= limit:
            raise ValueError(f"{name} must be in [0, {limit}), not {low} to {high}")
    _, positions, slots = inputs
    rows = len(slots)
    if len(set(slots.tolist())) < rows:
        raise ValueError(f"slots {slots.tolist()}: each row needs its own")
    if not visible[np.arange(rows), slots].all():
        raise ValueError("each row must see its own slot")
    if not np.array_equal(visible.sum(axis=1), positions + 1):
        raise ValueError("a row at position p must see p + 1 slots: its path and itself")
