"""What a core loses while another one computes: on many virtual machines two cores are two threads of one."""

from __future__ import annotations

import os
import statistics
import time
from threading import Barrier, Thread

import torch

_ROUNDS = 6
_SECONDS = 0.04
"""Time of a measurement; a round takes two."""
_SIZE = 256
"""Rows and columns of the matrices: a product takes less than a millisecond."""


def speed_beside(core: int, other: int) -> float:
    """Return the share of its speed that `core` keeps while `other` computes: 1 for two cores, 0.5 for halves of one.

    Takes half a second. Both speeds are the best of several, since other work on the machine only slows them.
    """
    rounds = [(_speed(core), _speed(core, other)) for _ in range(_ROUNDS)]
    alone, beside = map(max, zip(*rounds, strict=True))
    return float(beside / alone)


def _speed(*cores: int) -> float:
    """Matrix products for each second of computing, the mean over the cores, which compute at the same time."""
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
