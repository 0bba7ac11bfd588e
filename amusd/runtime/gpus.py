"""The GPUs of this machine and what is known of them, to judge where models should go. Opens no context."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

_PROBE_SECONDS = 10.0
_QUERY = ("uuid", "memory.used", "utilization.gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, as torch numbers them."""

    name: str
    memory_bytes: int
    bandwidth: float | None = None
    """Bytes per second between the GPU and its memory at most; None where the driver does not say."""
    used_bytes: int | None = None
    """Memory in use by all processes; None where nvidia-smi does not say."""
    busy: float | None = None
    """Share of the last second or so in which any kernel ran; None where nvidia-smi does not say."""
    peers: frozenset[int] = frozenset()
    """Numbers of the GPUs whose memory this one can reach without the host."""

    def __str__(self) -> str:
        return f"{self.name}, {self.memory_bytes / 2**30:.0f} GiB"


def look_at_gpus(num_gpus: int) -> tuple[Gpu, ...]:
    """The first `num_gpus`. Initialises CUDA in this process, which must not fork afterwards."""
    if num_gpus == 0:
        return ()
    import torch

    use = _usage()  # first: what follows is not to be counted
    gpus = []
    for number in range(num_gpus):
        properties: Any = torch.cuda.get_device_properties(number)
        used_bytes, busy = use.get(str(getattr(properties, "uuid", "")).removeprefix("GPU-"), (None, None))
        others = (other for other in range(num_gpus) if other != number)
        gpus.append(
            Gpu(
                name=properties.name,
                memory_bytes=properties.total_memory,
                bandwidth=_bandwidth(properties),
                used_bytes=used_bytes,
                busy=busy,
                peers=frozenset(other for other in others if torch.cuda.can_device_access_peer(number, other)),
            )
        )
    return tuple(gpus)


def _bandwidth(properties: Any) -> float | None:
    """Two transfers a clock, over the whole width of the bus."""
    clock_khz, width_bits = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    return 2 * clock_khz * 1e3 * width_bits / 8 or None


def _usage() -> dict[str, tuple[int | None, float | None]]:
    """Bytes in use and share of time with work, by UUID; empty where nvidia-smi is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = (line.split(", ") for line in done.stdout.splitlines())
    return {
        row[0].removeprefix("GPU-"): (_scaled(row[1], 2**20), _share(row[2])) for row in rows if len(row) == len(_QUERY)
    }


def _scaled(text: str, unit: int) -> int | None:
    """A whole number of units; None for `[N/A]` and the like."""
    return int(text) * unit if text.isdecimal() else None


def _share(percent: str) -> float | None:
    return int(percent) / 100 if percent.isdecimal() else None
