"""CUDA graphs: work on fixed addresses, captured once and replayed with one launch.

Captures, replays and events name their device, since torch's default is the current device.

References: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
"""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from amusd.errors import AmusdError, DeviceError, first_line
from amusd.transport.base import give_way

Work = Callable[[], None]
Replay = Callable[[], None]
Capture = Callable[[Work], Replay]
"""Turns work on fixed addresses into a function that repeats it."""

DEVICE_SECONDS = 60.0
"""Longest wait for a device, which then counts as lost."""
_WARM_UP_RUNS = 2  # kernels are chosen, and memory is allocated, in the first runs
_CHECK_SECONDS = 0.005  # between checks of the other ranks while the device computes


def run_each_time(work: Work) -> Replay:
    """A `Capture` that captures nothing, for graphs that are off or fail."""
    return work


def graph_capture(device: torch.device) -> Capture:
    """Return a `Capture` of CUDA graphs for one worker; the graphs share a side stream and a memory pool."""
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]  # of torch

    def capture(work: Work) -> Replay:
        """Call `work` twice, then once more to capture it. Raises `DeviceError`."""
        graph, caller = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        # The stream is current around the capture, too, since torch leaves it current if a capture fails.
        with torch.cuda.device(device), torch.cuda.stream(stream):
            stream.wait_stream(caller)
            for _ in range(_WARM_UP_RUNS):
                work()
            # thread_local: threads of the link, of NCCL and of the allocator may use the device meanwhile.
            capturing = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
            with _capturing(device, pool), capturing:
                work()
        caller.wait_stream(stream)

        def replay() -> None:
            with torch.cuda.device(device):
                graph.replay()

        return replay

    return capture


@contextlib.contextmanager
def _capturing(device: torch.device, pool: Any) -> Iterator[None]:
    """Collect no garbage during a capture: pinned memory would be marked on the captured stream.

    Raises `DeviceError` for work that cannot be captured, and for an empty graph, for which torch only warns.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="The CUDA Graph is empty")
            yield
    except Exception as error:
        with contextlib.suppress(RuntimeError):  # if torch has ended the capture already
            torch._C._cuda_endAllocateToPool(device.index, pool)  # noqa: SLF001 - no public name
            torch._C._cuda_releasePool(device.index, pool)  # noqa: SLF001 - no public name
        cause = error.__context__ or error  # torch's own error says only that an earlier one exists
        if isinstance(cause, AmusdError):  # of lost ranks
            raise cause from None
        raise DeviceError(f"a pass on {device} cannot be captured: {first_line(cause)}") from error
    finally:
        if was_enabled:
            gc.enable()


def wait_for(device: torch.device, check: Callable[[], None] = lambda: None) -> None:
    """Wait for all work given to `device`, if it is a GPU. Raises `DeviceError` after `DEVICE_SECONDS`.

    `check` is called every few milliseconds and may raise. Other threads run meanwhile.
    """
    if device.type == "cpu":
        return
    with torch.cuda.device(device):
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch is untyped here
        event.record()
    now = time.monotonic()
    deadline, next_check = now + DEVICE_SECONDS, now + _CHECK_SECONDS
    while not event.query():
        give_way()  # lets other threads have the interpreter, which `query` does not
        now = time.monotonic()
        if now > deadline:
            raise DeviceError(f"{device} did not finish a pass within {DEVICE_SECONDS:g} seconds")
        if now > next_check:
            check()
            next_check = now + _CHECK_SECONDS


def fetch(found: Tensor, wait: Callable[[], None]) -> Tensor:
    """A copy on the host (pinned for a GPU), complete after `wait`."""
    on_host = torch.empty(found.shape, dtype=found.dtype, pin_memory=found.device.type == "cuda")
    on_host.copy_(found, non_blocking=True)
    wait()
    return on_host
