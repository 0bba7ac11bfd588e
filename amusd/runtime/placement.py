"""The role of each rank of the world, and the device it computes on.

    world    0 .. T-1    T .. T+D-1      T, D: target_tensor_parallel_size, draft_tensor_parallel_size
    role     target      draft
    rank     0 .. T-1    D-1 .. 0        among those of the role; 0 leads

The first rank of the world leads the target and the last one the draft. Lists with an entry for each rank, such as
`hardware.devices`, are in the order of the world.

    GPUs of the machine                the target's ranks         the draft's ranks
    none                               on the CPU                 on the CPU
    one for each rank, or more         on the first ones          on the ones behind them
    one for each rank of the target    on the first ones          on the last ones, which the target has too
    fewer                              spread over all of them    on the last ones, which the target has too

On several machines each one's ranks are placed in this way on its own GPUs. Pure functions of how many GPUs and how
many ranks there are, by the standard library alone: `devices.py` knows what is there, and refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from amusd.config import EngineConfig
from amusd.types import Role

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RoleRank:
    """A rank among those of its role."""

    role: Role
    rank: int

    def __str__(self) -> str:
        return f"rank {self.rank} of the {self.role.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine and the ranks that are on it."""

    name: str
    num_gpus: int
    num_target_ranks: int
    num_draft_ranks: int


def num_ranks_of(config: EngineConfig, role: Role) -> int:
    """Number of processes that share a role's model."""
    return config.target_tensor_parallel_size if role is Role.TARGET else config.draft_tensor_parallel_size


def rank_layout(config: EngineConfig) -> list[RoleRank]:
    """One entry for each rank of the world."""
    targets = [RoleRank(Role.TARGET, rank) for rank in range(config.target_tensor_parallel_size)]
    drafts = [RoleRank(Role.DRAFT, rank) for rank in reversed(range(config.draft_tensor_parallel_size))]
    return [*targets, *drafts]


def in_role(of_world: Sequence[_T], config: EngineConfig, role: Role) -> list[_T]:
    """Select, from one value per rank of the world, the values of `role`, in the order of its ranks."""
    size = config.target_tensor_parallel_size
    return list(of_world[:size]) if role is Role.TARGET else list(reversed(of_world[size:]))


def place_on(nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return the device of each rank of the world: the target's on these machines in order, then the draft's."""
    targets: list[str] = []
    drafts: list[str] = []
    for node in nodes:
        devices = place(node.num_gpus, node.num_target_ranks, node.num_draft_ranks)
        targets += devices[: node.num_target_ranks]
        drafts += devices[node.num_target_ranks :]
    return (*targets, *drafts)


def devices_on(nodes: Sequence[Node], devices: Sequence[_T]) -> list[list[_T]]:
    """Split values, one for each rank of the world, by machine; the target's ranks come first on each."""
    targets = iter(devices[: sum(node.num_target_ranks for node in nodes)])
    drafts = iter(devices[sum(node.num_target_ranks for node in nodes) :])
    return [[*islice(targets, node.num_target_ranks), *islice(drafts, node.num_draft_ranks)] for node in nodes]


def place(num_gpus: int, num_target_ranks: int = 1, num_draft_ranks: int = 1) -> tuple[str, ...]:
    """Device of each rank of one machine, the target's first."""
    if num_gpus == 0:
        return ("cpu",) * (num_target_ranks + num_draft_ranks)
    num_for_draft = min(num_draft_ranks, num_gpus)
    first = min(num_target_ranks, num_gpus - num_for_draft)
    return (
        *_spread(num_target_ranks, range(min(num_target_ranks, num_gpus))),
        *_spread(num_draft_ranks, range(first, first + num_for_draft)),
    )


def _spread(num_ranks: int, gpus: range) -> list[str]:
    """Return the GPU of each rank; neighbouring ranks share one if there are fewer GPUs than ranks."""
    return [f"cuda:{gpus[rank * len(gpus) // num_ranks]}" for rank in range(num_ranks)]


def sharing(config: EngineConfig, devices: Sequence[str]) -> str | None:
    """Say which GPUs of `devices` (one for each rank) several ranks share: `target and draft share cuda:0`.

    None where no GPU is shared. A draft that only looks up in the prompt has no model, and shares nothing.
    """
    roles = [Role.TARGET, Role.DRAFT] if drafts_with_model(config) else [Role.TARGET]
    parts = []
    for device in sorted(set(devices) - {"cpu"}, key=gpu_number):
        counts = {role: in_role(devices, config, role).count(device) for role in roles}
        if sum(counts.values()) > 1:
            who = [_count_of(role, count, num_ranks_of(config, role)) for role, count in counts.items() if count]
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
