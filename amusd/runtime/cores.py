"""Which CPU cores a worker gets, and what a core loses while another one computes.

Cores are given out before torch starts its threads: it is imported only to measure.
"""

from __future__ import annotations

import os
import statistics
import time
from contextlib import suppress
from pathlib import Path
from threading import Barrier, Thread

from amusd.config import EngineConfig, HardwareConfig
from amusd.types import Role

_ROUNDS = 6
_SECONDS = 0.04
"""Time of a measurement; a round takes two."""
_SIZE = 256
"""Rows and columns of the matrices: a product takes less than a millisecond."""


def allowed_cores() -> list[int]:
    """The cores this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores_of_parent() -> list[int]:
    """The cores of the process that has started this one, which may keep to some of them; else those of this one."""
    if hasattr(os, "sched_getaffinity"):
        with suppress(OSError):  # it has ended
            return sorted(os.sched_getaffinity(os.getppid()))
    return allowed_cores()


def cores_for(
    role: Role,
    allowed: list[int],
    hardware: HardwareConfig,
    *,
    rank: int = 0,
    num_target_ranks: int = 1,
    num_draft_ranks: int = 1,
) -> set[int]:
    """The first cores for the target, the last for the draft; none where the two would have to share.

    `rank`: which one of the role. Each has cores of its own where there are enough; else those of a role share its
    part, which is as large as its share of the ranks, and no smaller than one of them needs.
    """
    count, num_ranks = hardware.num_threads, num_target_ranks + num_draft_ranks
    if not hardware.pin_cores or len(allowed) < 2 * count:
        return set()
    if len(allowed) < num_ranks * count:
        border = len(allowed) * num_target_ranks // num_ranks
        border = min(max(border, count), len(allowed) - count)
        return set(allowed[:border] if role is Role.TARGET else allowed[border:])
    start = rank * count if role is Role.TARGET else len(allowed) - (rank + 1) * count
    return set(allowed[start : start + count])


def pin_rank(config: EngineConfig, role: Role, allowed: list[int], rank: int = 0) -> None:
    """Run this process, one of a role's ranks, on its own of the `allowed` cores alone."""
    sizes = {
        "num_target_ranks": config.target_tensor_parallel_size,
        "num_draft_ranks": config.draft_tensor_parallel_size,
    }
    pin_to(cores_for(role, allowed, config.hardware, rank=rank, **sizes))


def pin_to(cores: set[int]) -> None:
    """Run all threads of this process on these cores alone; nothing for no cores, or where that cannot be done."""
    if cores and hasattr(os, "sched_setaffinity"):
        for thread in _threads():
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(thread, cores)


def _threads() -> list[int]:
    """Ids of this process's threads; 0 for the calling one where the system does not list them."""
    folder = Path("/proc/self/task")
    return [int(entry.name) for entry in folder.iterdir()] if folder.is_dir() else [0]


def speed_beside(core: int, other: int) -> float:
    """Return the share of its speed that `core` keeps while `other` computes: 1 for two cores, 0.5 for halves of one.

    On many virtual machines two cores are two threads of one. Takes half a second. Both speeds are the best of several,
    since other work on the machine only slows them.
    """
    rounds = [(_speed(core), _speed(core, other)) for _ in range(_ROUNDS)]
    alone, beside = map(max, zip(*rounds, strict=True))
    return float(beside / alone)


def _speed(*cores: int) -> float:
    """Matrix products for each second of computing, the mean over the cores, which compute at the same time."""
    import torch

    speeds = [0.0] * len(cores)
    start = Barrier(len(cores))

    def compute(index: int, core: int) -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})  # this thread alone
        torch.set_num_threads(1)
        factor, result = torch.ones(_SIZE, _SIZE), torch.empty(_SIZE, _SIZE)
        torch.mm(factor, factor, out=result)
        start.wait()
        end, began, count = time.perf_counter() + _SECONDS, time.thread_time(), 0
        while time.perf_counter() < end:
            torch.mm(factor, factor, out=result)
            count += 1
        speeds[index] = count / (time.thread_time() - began)

    threads = [Thread(target=compute, args=each) for each in enumerate(cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statistics.fmean(speeds)
