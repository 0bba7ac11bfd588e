"""How fast a device reads its memory, measured with torch's own reduction: the floor under every forward pass."""

from __future__ import annotations

import time

import torch

_CPU_BYTES = 256 << 20  # far beyond any cache
_GPU_BYTES = 2 << 30
_NUM_READS = 7


def read_bandwidth(device: str) -> float:
    """GB/s (10^9 bytes) of a sequential read: the best of several, with this process's number of threads."""
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
