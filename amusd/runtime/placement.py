"""The role of each rank of the world, and the device it computes on.

    world    0 .. T-1    T               T: target_tensor_parallel_size
    role     target      draft

Rank 0 leads the target. Lists with an entry for each rank, such as `hardware.devices`, are in the order of the world.

    GPUs of the machine                the target's ranks         the draft
    none                               on the CPU                 on the CPU
    one for each rank, or more         on the first ones          on the one behind them
    one for each rank of the target    on the first ones          on the last one, which the target has too
    fewer                              spread over all of them    on the last one, which the target has too

On several machines this holds for the ranks of each. Pure functions of how many GPUs and how many ranks there are, by
the standard library alone: `devices.py` knows what is there, and refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from amusd.config import EngineConfig
from amusd.types import Role

_T = TypeVar("_T")


def in_role(of_world: Sequence[_T], role: Role) -> list[_T]:
    """Select, from one value per rank of the world, the values of `role`, in the order of its ranks."""
    return list(of_world[:-1] if role is Role.TARGET else of_world[-1:])


def place(num_gpus: int, num_target_ranks: int = 1) -> tuple[str, ...]:
    """Device of each rank of the world. Neighbouring ranks share a GPU if there are too few."""
    if num_gpus == 0:
        return ("cpu",) * (num_target_ranks + 1)
    num_used = min(num_target_ranks, num_gpus)
    targets = [f"cuda:{rank * num_used // num_target_ranks}" for rank in range(num_target_ranks)]
    return (*targets, f"cuda:{min(num_target_ranks, num_gpus - 1)}")


def sharing(config: EngineConfig, devices: Sequence[str]) -> str | None:
    """Say which GPUs of `devices` (one for each rank) several ranks share: `target and draft share cuda:0`.

    None where no GPU is shared. A draft that only looks up in the prompt has no model, and shares nothing.
    """
    roles = [Role.TARGET, Role.DRAFT] if drafts_with_model(config) else [Role.TARGET]
    parts = []
    for device in sorted(set(devices) - {"cpu"}, key=gpu_number):
        counts = {role: in_role(devices, role).count(device) for role in roles}
        if sum(counts.values()) > 1:
            who = [_count_of(role, count, len(in_role(devices, role))) for role, count in counts.items() if count]
            parts.append(f"{' and '.join(who)} share {device}")
    return ", ".join(parts) or None


def drafts_with_model(config: EngineConfig) -> bool:
    """Whether any drafter computes on the draft's device."""
    return any(drafter.can.has_model or drafter.can.needs_features for drafter in config.drafters)


def gpu_number(device: str) -> int:
    """`cuda:1` is 1."""
    return int(device.removeprefix("cuda:"))


def _count_of(role: Role, count: int, num_ranks: int) -> str:
    return role.value if num_ranks == 1 else f"{count} of {num_ranks} ranks of the {role.value}"
