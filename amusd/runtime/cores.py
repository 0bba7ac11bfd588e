"""Which CPU cores a worker gets. Standard library only: cores are given out before torch starts its threads."""

from __future__ import annotations

import os

from amusd.config import HardwareConfig
from amusd.types import Role


def allowed_cores() -> list[int]:
    """The cores this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores_for(
    role: Role, allowed: list[int], hardware: HardwareConfig, *, rank: int = 0, num_ranks: int = 1
) -> set[int]:
    """The first cores for the target, the last for the draft; none where the two would have to share.

    The target's `num_ranks` have cores of their own where there are enough, and otherwise share all but the draft's.
    """
    count = hardware.num_threads
    if not hardware.pin_cores or len(allowed) < 2 * count:
        return set()
    if role is Role.DRAFT:
        return set(allowed[-count:])
    if len(allowed) < (num_ranks + 1) * count:
        return set(allowed[:-count])
    return set(allowed[rank * count : (rank + 1) * count])


def pin_to(cores: set[int]) -> None:
    """Run this process on these cores alone; nothing for no cores, or where that cannot be done."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
