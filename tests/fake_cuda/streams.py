"""What takes the place of the members of `torch.cuda`. Names and parameters are torch's."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from fake_cuda.gpus import FakeGpus
from fake_cuda.record import Created, Graph, Replay, StreamId, Wait

PROPERTIES = SimpleNamespace(
    name="Fake H200", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30, warp_size=32
)


class Double:
    gpus: FakeGpus


class Stream(Double):
    """`torch.cuda.Stream`. Work is done when it is asked for, so streams need not wait for each other."""

    def __init__(self, device: Any = None, priority: int = 0, *, known: StreamId | None = None) -> None:
        self.id = self.gpus.new_stream(self.gpus.number(device)) if known is None else known
        self.device = torch.device("cuda", self.id.device)
        self.device_index = self.id.device
        self.cuda_stream = self.id.number

    def wait_stream(self, stream: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event) -> Event:
        event.record(self)
        return event

    def query(self) -> bool:
        return self.gpus.is_finished()

    def synchronize(self) -> None:
        self.gpus.waited("stream", self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)


class Event(Double):
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._stream: StreamId | None = None
        self._is_pending = False

    def record(self, stream: Stream | None = None) -> None:
        recorded_on = self.gpus.current_streams[self.gpus.current_device] if stream is None else stream.id
        if self._stream is None:
            self.gpus.record.append(Created("event", recorded_on))
        elif self._stream.device != recorded_on.device:
            raise RuntimeError("an event of one device cannot be recorded on a stream of another")
        self._stream, self._is_pending = recorded_on, True

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        if self._is_pending and not self.gpus.is_finished():
            return False
        self._finish()
        return True

    def synchronize(self) -> None:
        while self._is_pending and not self.gpus.is_finished():
            time.sleep(0.001)
        self._finish()

    def elapsed_time(self, end: Event) -> float:
        return 0.0

    def _finish(self) -> None:
        if self._is_pending:
            self._is_pending = False
            self.gpus.record.append(Wait("event", self._stream))


class CUDAGraph(Double):
    def __init__(self, keep_graph: bool = False) -> None:
        self.captured: Graph | None = None

    def pool(self) -> object:
        return self.captured.pool

    def replay(self) -> None:
        """Launched on the device that was captured, whichever is the current one."""
        self.gpus.record.append(Replay(self.captured, self.gpus.current_streams[self.captured.stream.device]))
        for node in self.captured.nodes:
            node.repeat()

    def reset(self) -> None:
        self.captured = None


class graph(Double):  # noqa: N801 - torch's name
    """`torch.cuda.graph`: without a stream it takes one that was made, for the whole process, at its first use."""

    def __init__(
        self,
        cuda_graph: CUDAGraph,
        pool: object = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
    ) -> None:
        gpus = self.gpus
        if stream is None:
            gpus.default_capture_stream = gpus.default_capture_stream or gpus.new_stream(gpus.current_device)
        stream_id = gpus.default_capture_stream if stream is None else stream.id
        self._context = gpus.using(stream_id)
        self._graph = cuda_graph
        self._captured = Graph(stream_id, object() if pool is None else pool, capture_error_mode)

    def __enter__(self) -> None:
        self._context.__enter__()
        self.gpus.begin(self._captured)

    def __exit__(self, *error: object) -> None:
        self.gpus.end()
        self._graph.captured = self._captured
        self._context.__exit__(*error)
        if self._captured.is_empty:
            warnings.warn("The CUDA Graph is empty.", stacklevel=2)


def doubles(gpus: FakeGpus) -> dict[str, Any]:
    classes = {cls.__name__: type(cls.__name__, (cls,), {"gpus": gpus}) for cls in (Stream, Event, CUDAGraph, graph)}
    known: Callable[[StreamId], Stream] = lambda stream: classes["Stream"](known=stream)  # noqa: E731

    @contextmanager
    def use_stream(stream: Stream | None) -> Iterator[None]:
        with gpus.using(gpus.current_streams[gpus.current_device] if stream is None else stream.id):
            yield

    @contextmanager
    def use_device(device: Any) -> Iterator[None]:
        before, gpus.current_device = gpus.current_device, gpus.number(device)
        try:
            yield
        finally:
            gpus.current_device = before

    def set_device(device: Any) -> None:
        gpus.current_device = gpus.number(device)

    return {
        **classes,
        **_facts(gpus),
        "stream": use_stream,
        "device": use_device,
        "set_device": set_device,
        "current_device": lambda: gpus.current_device,
        "current_stream": lambda device=None: known(gpus.current_streams[gpus.number(device)]),
        "default_stream": lambda device=None: known(StreamId(gpus.number(device), 0)),
        "graph_pool_handle": object,
        "is_current_stream_capturing": lambda: gpus.is_capturing,
        "synchronize": lambda device=None: gpus.waited("device", StreamId(gpus.number(device), 0)),
    }


def _facts(gpus: FakeGpus) -> dict[str, Any]:
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: gpus.num_devices,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_properties": lambda device=None: PROPERTIES,
        "mem_get_info": lambda device=None: (PROPERTIES.total_memory, PROPERTIES.total_memory),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "set_sync_debug_mode": lambda mode: None,
    }
