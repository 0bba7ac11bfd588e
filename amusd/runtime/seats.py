"""Which rank of the world does what. Standard library only.

    world    0 .. T-1    T .. T+D-1      T, D: target_tensor_parallel_size, draft_tensor_parallel_size
    role     target      draft
    rank     0 .. T-1    D-1 .. 0        among those of the role; 0 leads

The first rank of the world leads the target and the last one the draft, whatever the sizes, so that a process knows
whether it leads before it has seen a configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from amusd.config import EngineConfig
from amusd.types import Role

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of one process."""

    role: Role
    rank: int
    """Among those of the role."""

    def __str__(self) -> str:
        return f"rank {self.rank} of the {self.role.value}"


def num_ranks_of(config: EngineConfig, role: Role) -> int:
    """How many processes share a role's model."""
    return config.target_tensor_parallel_size if role is Role.TARGET else config.draft_tensor_parallel_size


def seats(config: EngineConfig) -> list[Seat]:
    """Of each rank of the world."""
    targets = [Seat(Role.TARGET, rank) for rank in range(config.target_tensor_parallel_size)]
    drafts = [Seat(Role.DRAFT, rank) for rank in reversed(range(config.draft_tensor_parallel_size))]
    return [*targets, *drafts]


def in_role(of_world: Sequence[_T], config: EngineConfig, role: Role) -> list[_T]:
    """Of something for each rank of the world, what the ranks of a role have, in their order."""
    size = config.target_tensor_parallel_size
    return list(of_world[:size]) if role is Role.TARGET else list(reversed(of_world[size:]))
