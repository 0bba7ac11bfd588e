"""Pieces of work timed in turns, so that a machine whose speed drifts treats them alike; the speed of its memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

K = TypeVar("K", bound=Hashable)

WARM_UP_ROUNDS = 2

_CPU_BYTES = 256 << 20  # far beyond any cache
_GPU_BYTES = 2 << 30
_NUM_READS = 7


def time_in_turns(
    work: Mapping[K, Callable[[], object]],
    num_rounds: int,
    progress: Callable[[int, int], None],
    num_warm_up_rounds: int = WARM_UP_ROUNDS,
) -> dict[K, list[float]]:
    """Milliseconds of each piece of work in each round. The work itself waits for its device.

    Rounds to warm up come first and are not counted.
    """
    times: dict[K, list[float]] = {key: [] for key in work}
    for number in range(num_warm_up_rounds + num_rounds):
        progress(number, num_warm_up_rounds + num_rounds)
        for key, run in work.items():
            start = time.perf_counter()
            run()
            if number >= num_warm_up_rounds:
                times[key].append(1000 * (time.perf_counter() - start))
    return times


def medians(times: Mapping[K, list[float]]) -> dict[K, float]:
    """The median of each."""
    return {key: statistics.median(values) for key, values in times.items()}


def median_ratio(numerator: list[float], denominator: list[float]) -> float:
    """Median of the ratios round by round: both were measured a moment apart."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def read_bandwidth(device: str) -> float:
    """GB/s (10^9 bytes) of a sequential read by torch's own reduction: the floor under every forward pass.

    The best of several reads, with this process's number of threads.
    """
    on_gpu = device.startswith("cuda")
    num_bytes = _GPU_BYTES if on_gpu else _CPU_BYTES
    values = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    best = float("inf")
    with torch.inference_mode():
        for _ in range(_NUM_READS):
            if on_gpu:
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            values.sum()
            if on_gpu:
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - start)
    return num_bytes / best / 1e9
