"""Times of repeated work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

WARM_UP_ROUNDS = 2


def wait_for(device: str) -> None:
    """Wait until the device has done all work."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], object], rounds: int, device: str) -> list[float]:
    """Milliseconds of each round, with the device's work."""
    times = []
    for number in range(WARM_UP_ROUNDS + rounds):
        wait_for(device)
        started = time.perf_counter()
        work()
        wait_for(device)
        if number >= WARM_UP_ROUNDS:
            times.append(1000 * (time.perf_counter() - started))
    return times


def figures(times: list[float]) -> dict[str, float]:
    """Median and spread of times, for a record."""
    return {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times), "rounds": len(times)}
