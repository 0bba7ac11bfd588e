"""CUDA graphs: work on fixed addresses, captured once and replayed with one launch.

Captures, replays and events name their device, since the current device decides where a capture listens.

References: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from amusd.errors import AmusdError, DeviceError, first_line

Work = Callable[[], None]
Replay = Callable[[], None]
Capture = Callable[[Work], Replay]
"""Turns work on fixed addresses into a function that repeats it."""

DEVICE_SECONDS = 60.0
"""Longest replay before the device counts as lost."""
_WARM_UP_RUNS = 2  # kernels are chosen, and memory is allocated, in the first runs
_CHECK_SECONDS = 0.005  # between two looks at the other ranks while the device computes
_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device`, without waiting."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def run_each_time(work: Work) -> Replay:
    """A `Capture` that captures nothing, where graphs are turned off or fail."""
    return work


def graph_capture(device: torch.device) -> Capture:
    """A `Capture` of CUDA graphs, for one worker. They share a side stream and a memory pool, made for the first."""

    @functools.cache
    def stream_and_pool() -> tuple[Any, Any]:
        return torch.cuda.Stream(device), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]  # of torch

    def capture(work: Work) -> Replay:
        with torch.cuda.device(device):
            return partial(_replay, _captured(work, device, *stream_and_pool()), device)

    return capture


def _captured(work: Work, device: torch.device, stream: Any, pool: Any) -> Any:
    """The graph of `work`, which runs three times with its present inputs. Raises `DeviceError`."""
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):  # around the capture, too: torch leaves its stream current where that fails
        for _ in range(_WARM_UP_RUNS):
            work()
        # thread_local: threads of the link, of NCCL and of the allocator may use the device meanwhile.
        capturing = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        with _errors_of_capture(device, pool), _without_collection(), capturing:
            work()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph


def _replay(graph: Any, device: torch.device) -> None:
    with torch.cuda.device(device):
        graph.replay()


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Collect no garbage inside: freed in a capture, pinned memory would be marked on the captured stream."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _errors_of_capture(device: torch.device, pool: Any) -> Iterator[None]:
    """Raise `DeviceError` for work that cannot be captured, and for an empty graph, for which torch only warns."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="The CUDA Graph is empty")
            yield
    except Exception as error:
        with contextlib.suppress(RuntimeError):  # where torch has ended the capture, this is done
            torch._C._cuda_endAllocateToPool(device.index, pool)  # noqa: SLF001 - no public name
            torch._C._cuda_releasePool(device.index, pool)  # noqa: SLF001 - no public name
        cause = error.__context__ or error  # torch's own error says only that there was one before
        if isinstance(cause, AmusdError):  # of lost ranks
            raise cause from None
        raise DeviceError(f"a pass on {device} cannot be captured: {first_line(cause)}") from error


def wait_for(device: torch.device, event: Any, check: Callable[[], None]) -> None:
    """Wait for all work given to a GPU, with an `event` of torch. Raises `DeviceError` after `DEVICE_SECONDS`.

    `check` is called every few milliseconds and may raise. Other threads run meanwhile.
    """
    with torch.cuda.device(device):
        event.record()
    now = time.monotonic()
    deadline, next_check = now + DEVICE_SECONDS, now + _CHECK_SECONDS
    while not event.query():
        _yield()  # lets other threads have the interpreter, which `query` does not
        now = time.monotonic()
        if now > deadline:
            raise DeviceError(f"{device} did not finish a pass within {DEVICE_SECONDS:g} seconds")
        if now > next_check:
            check()
            next_check = now + _CHECK_SECONDS
