"""The role of each rank of the world. Standard library only.

    world    0 .. T-1    T .. T+D-1      T, D: target_tensor_parallel_size, draft_tensor_parallel_size
    role     target      draft
    rank     0 .. T-1    D-1 .. 0        among those of the role; 0 leads

The first rank of the world leads the target and the last one the draft. Lists with an entry for each rank, such as
`hardware.devices`, are in the order of the world.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
