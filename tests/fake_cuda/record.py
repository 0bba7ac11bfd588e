"""The record of work on fake GPUs: one entry for each kernel, copy, wait, capture and replay, in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from fake_cuda.tensors import Direction, nothing
from torch import Tensor


class StreamId(NamedTuple):
    device: int
    number: int


@dataclass(frozen=True, slots=True)
class Operand:
    shape: tuple[int, ...]
    dtype: torch.dtype
    byte_offset: int


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    stream: StreamId
    operands: tuple[Operand, ...] = ()
    repeat: Callable[[], None] = field(default=nothing, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Copy:
    direction: Direction
    num_bytes: int
    is_blocking: bool
    stream: StreamId
    repeat: Callable[[], None] = field(default=nothing, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Wait:
    stream: StreamId


@dataclass(slots=True, eq=False)
class Graph:
    """A captured graph."""

    stream: StreamId
    pool: object
    mode: str
    nodes: list[Kernel | Copy] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)
    """Tensors in the pool's memory, which other graphs use too."""


@dataclass(frozen=True, slots=True)
class Capture:
    """The beginning of a capture."""

    graph: Graph

    @property
    def stream(self) -> StreamId:
        """The stream that is captured."""
        return self.graph.stream


@dataclass(frozen=True, slots=True)
class Replay:
    graph: Graph
    stream: StreamId


Entry = Kernel | Copy | Wait | Capture | Replay


class Record(list[Entry]):
    """Entries in their order. Work inside a graph counts once for each of its replays, not for its capture."""

    @property
    def work(self) -> list[Kernel | Copy]:
        found: list[Kernel | Copy] = []
        for entry in self:
            if isinstance(entry, Replay):
                found += entry.graph.nodes
            elif isinstance(entry, Kernel | Copy):
                found.append(entry)
        return found

    @property
    def kernels(self) -> list[Kernel]:
        return [entry for entry in self.work if isinstance(entry, Kernel)]

    @property
    def copies(self) -> list[Copy]:
        return [entry for entry in self.work if isinstance(entry, Copy)]

    @property
    def blocking_copies(self) -> list[Copy]:
        return [copy for copy in self.copies if copy.is_blocking]

    @property
    def bytes_out(self) -> int:
        return sum(copy.num_bytes for copy in self.copies if copy.direction == "out")

    @property
    def waits(self) -> list[Wait]:
        return [entry for entry in self if isinstance(entry, Wait)]

    @property
    def captures(self) -> list[Graph]:
        """Graphs that were captured."""
        return [entry.graph for entry in self if isinstance(entry, Capture)]

    @property
    def replays(self) -> list[Replay]:
        return [entry for entry in self if isinstance(entry, Replay)]

    @property
    def devices(self) -> set[int]:
        return {entry.stream.device for entry in [*self, *self.work]}
