"""Fake GPUs, which do their work at once and record it.

As on real ones, work goes to the current stream of the device that its tensors are on. So a graph gets only the work
of its own stream, and none of another device.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from fake_cuda.late import LateStreams
from fake_cuda.record import Capture, Copy, Graph, Kernel, Operand, Record, Replay, StreamId, Wait
from fake_cuda.tensors import CudaTensor, Direction, nothing
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class FakeGpus:
    def __init__(self, num_devices: int, inner_device: str, late: LateStreams | None = None) -> None:
        self.inner_device = inner_device
        self.num_devices = num_devices
        self.late = late
        """None: all work is done at once."""
        self.record = Record()
        self.is_finished: Callable[[], bool] = lambda: True
        self.current_device = 0
        self.current_streams = [StreamId(index, 0) for index in range(num_devices)]
        self.kernels: dict[str, Callable[..., Any]] = {}
        """Doubles of Triton's kernels, by the operator's name; the others compute what torch does."""
        self._capturing: Graph | None = None
        self._stream_numbers = itertools.count(1)
        self.peak_bytes = 0
        """Peak memory of the operations' results in bytes; set it to 0 to begin anew."""
        self._memory: list[tuple[StorageWeakRef, int]] = []
        self._most_live_bytes = 0  # of all in it: what has expired since it was last looked at counts
        self._pinned: dict[int, Tensor] = {}  # by address; holding them keeps the addresses theirs
        self._under_way: list[tuple[Tensor, Tensor]] = []  # pinned memory that is being copied, and what it held
        self._last_replayed: Graph | None = None

    @contextmanager
    def recorded(self) -> Iterator[Record]:
        start, part = len(self.record), Record()
        yield part
        part += self.record[start:]

    @property
    def live_bytes(self) -> int:
        self._memory = [(storage, size) for storage, size in self._memory if not storage.expired()]
        self._most_live_bytes = sum(size for _, size in self._memory)
        return self._most_live_bytes

    # What tensors need

    def index_of(self, device: torch.device) -> int:
        index = self.current_device if device.index is None else device.index
        if index >= self.num_devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}")
        return index

    def is_pinned(self, host: Tensor) -> bool:
        return host.untyped_storage().data_ptr() in self._pinned

    def pin(self, host: Tensor) -> Tensor:
        self._pinned[host.untyped_storage().data_ptr()] = host
        return host

    def reads(self, host: Tensor) -> None:
        """A device reads `host` until the next wait."""
        self._under_way.append((host, host.clone()))

    def finished(self) -> None:
        """All work is done. Raises `AssertionError` where pinned memory was written while it was read."""
        if self.late is not None:
            self.late.finish_all()
        under_way, self._under_way = self._under_way, []
        assert all(torch.equal(host, before) for host, before in under_way), "written while it was copied"

    def allocated(self, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        if self._capturing is not None and self.inner_device != "meta":  # where there is nothing to spoil
            self._capturing.made += tensors
        for storage in (tensor.untyped_storage() for tensor in tensors):
            self._memory.append((StorageWeakRef(storage), storage.nbytes()))
            self._most_live_bytes += storage.nbytes()
        if self._most_live_bytes > self.peak_bytes:
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def launched(self, name: str, index: int, operands: list[CudaTensor], repeat: Callable[[], None]) -> None:
        given = tuple(
            Operand(tuple(tensor.shape), tensor.dtype, tensor.storage_offset() * tensor.element_size())
            for tensor in operands
        )
        self._ran(Kernel(name, self.current_streams[index], given, repeat))

    def copied(
        self, direction: Direction, index: int, num_bytes: int, repeat: Callable[[], None], *, waits: bool
    ) -> None:
        self._ran(Copy(direction, num_bytes, waits, self.current_streams[index], repeat))
        if waits and self.late is not None:
            self.late.finish(self.late.mark(self.current_streams[index]))

    def check_may_wait(self, what: str) -> None:
        if self._capturing is not None and self._capturing.mode != "relaxed":
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")

    def _ran(self, work: Kernel | Copy) -> None:
        graph = self._capturing
        if graph is not None and graph.stream == work.stream:
            graph.nodes.append(work)
        else:
            self.record.append(replace(work, repeat=nothing))  # which would keep every tensor alive
            if self.late is not None:
                self.late.put(work.stream, work.repeat)

    # What the doubles of `torch.cuda` need (`streams.py`)

    def number(self, device: Any = None) -> int:
        if device is None:
            return self.current_device
        return self.index_of(torch.device("cuda", device) if isinstance(device, int) else torch.device(device))

    @contextmanager
    def using(self, stream: StreamId) -> Iterator[None]:
        device, before = self.current_device, self.current_streams[stream.device]
        self.current_device, self.current_streams[stream.device] = stream.device, stream
        try:
            yield
        finally:
            self.current_device, self.current_streams[stream.device] = device, before

    def new_stream(self, index: int) -> StreamId:
        return StreamId(index, next(self._stream_numbers))

    def waited(self, stream: StreamId) -> None:
        self.check_may_wait("waiting for a device")
        while not self.is_finished():
            time.sleep(0.001)
        self.finished()
        self.record.append(Wait(stream))

    def replayed(self, graph: Graph) -> None:
        """Spoil what the last replay made: graphs of one pool use the same memory."""
        for tensor in () if self._last_replayed is None else self._last_replayed.made:
            tensor.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else 77)
        self._last_replayed = graph

    def replay(self, graph: Graph, stream: StreamId) -> None:
        def work() -> None:
            self.replayed(graph)
            for node in graph.nodes:
                node.repeat()

        self.record.append(Replay(graph, stream))
        if self.late is None:
            work()
        else:
            self.late.put(stream, work)

    def begin(self, graph: Graph) -> None:
        self.check_may_wait("a capture")
        self.finished()  # torch waits for the device
        self.replayed(graph)
        self._capturing = graph
        self.record.append(Capture(graph))

    def end(self) -> None:
        self._capturing = None
