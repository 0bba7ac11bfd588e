"""Stand-ins for the members of `torch.cuda`. Names and parameters are torch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from fake_cuda.gpus import FakeGpus
from fake_cuda.record import Graph, StreamId, Wait
from fake_cuda.tensors import nothing

PROPERTIES = SimpleNamespace(
    name="Fake H200", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30, warp_size=32
)


class Double:
    gpus: FakeGpus


class Stream(Double):
    """`torch.cuda.Stream`."""

    def __init__(self, device: Any = None, *, known: StreamId | None = None) -> None:
        self.id = self.gpus.new_stream(self.gpus.number(device)) if known is None else known

    def wait_stream(self, stream: Stream) -> None:
        if (late := self.gpus.late) is not None:
            late.put(self.id, nothing, after=late.mark(stream.id))


class Event(Double):
    def record(self) -> None:
        self._stream = self.gpus.current_streams[self.gpus.current_device]
        self._mark = None if self.gpus.late is None else self.gpus.late.mark(self._stream)

    def query(self) -> bool:
        is_finished = self.gpus.is_finished()
        if is_finished:
            if self.gpus.late is None:
                self.gpus.finished()
            elif self._mark is not None:
                self.gpus.late.finish(self._mark)
            self.gpus.record.append(Wait(self._stream))
        return is_finished


class CUDAGraph(Double):
    captured: Graph

    def replay(self) -> None:
        """Launched on the device that was captured, whichever is the current one."""
        self.gpus.replay(self.captured, self.gpus.current_streams[self.captured.stream.device])


class graph(Double):  # noqa: N801 - torch's name
    def __init__(self, cuda_graph: CUDAGraph, pool: object, stream: Stream, capture_error_mode: str = "global") -> None:
        self._context = self.gpus.using(stream.id)
        cuda_graph.captured = self._captured = Graph(stream.id, pool, capture_error_mode)

    def __enter__(self) -> None:
        self._context.__enter__()
        self.gpus.begin(self._captured)

    def __exit__(self, *error: object) -> None:
        self.gpus.end()
        self._context.__exit__(*error)
        if not self._captured.nodes:
            warnings.warn("The CUDA Graph is empty.", stacklevel=2)


def doubles(gpus: FakeGpus) -> dict[str, Any]:
    classes = {cls.__name__: type(cls.__name__, (cls,), {"gpus": gpus}) for cls in (Stream, Event, CUDAGraph, graph)}
    known: Callable[[StreamId], Stream] = lambda stream: classes["Stream"](known=stream)  # noqa: E731

    @contextmanager
    def use_device(device: Any) -> Iterator[None]:
        before, gpus.current_device = gpus.current_device, gpus.number(device)
        try:
            yield
        finally:
            gpus.current_device = before

    def set_device(device: Any) -> None:
        gpus.current_device = gpus.number(device)

    def memory(_device: Any = None) -> tuple[int, int]:
        return PROPERTIES.total_memory, PROPERTIES.total_memory

    return {
        **classes,
        "stream": lambda stream: gpus.using(stream.id),
        "device": use_device,
        "set_device": set_device,
        "current_device": lambda: gpus.current_device,
        "current_stream": lambda device=None: known(gpus.current_streams[gpus.number(device)]),
        "graph_pool_handle": object,
        "synchronize": lambda device=None: gpus.waited(StreamId(gpus.number(device), 0)),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: gpus.num_devices,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_properties": lambda device=None: PROPERTIES,
        "mem_get_info": memory,
    }
