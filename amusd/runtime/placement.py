"""Which device each rank computes on: pure functions of how many GPUs and how many ranks there are.

    GPUs of the machine                the target's ranks         the draft's ranks
    none                               on the CPU                 on the CPU
    one for each rank, or more         on the first ones          on the ones behind them
    one for each rank of the target    on the first ones          on the last ones, which the target has too
    fewer                              spread over all of them    on the last ones, which the target has too

Where each role has a machine of its own, its ranks are on the first GPUs of that machine. Standard library only: knows
neither torch nor what is free, and refuses nothing (`devices.py` does).
"""

from __future__ import annotations

from collections.abc import Sequence

from amusd.config import EngineConfig
from amusd.runtime.rank_layout import in_role, num_ranks_of
from amusd.types import Role


def place(
    num_gpus: int, num_target_ranks: int = 1, num_draft_ranks: int = 1, *, apart: bool = False
) -> tuple[str, ...]:
    """Device of each rank of the world, the target's first.

    `apart`: each role has a machine of its own, with `num_gpus` GPUs.
    """
    if num_gpus == 0:
        return ("cpu",) * (num_target_ranks + num_draft_ranks)
    num_for_draft = min(num_draft_ranks, num_gpus)
    first = 0 if apart else min(num_target_ranks, num_gpus - num_for_draft)
    return (
        *_spread(num_target_ranks, range(min(num_target_ranks, num_gpus))),
        *_spread(num_draft_ranks, range(first, first + num_for_draft)),
    )


def _spread(num_ranks: int, gpus: range) -> list[str]:
    """Neighbouring ranks share a GPU where there are fewer GPUs than ranks."""
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
    return any(drafter.kind != "ngram" for drafter in config.drafters)


def gpu_number(device: str) -> int:
    """`cuda:1` is 1."""
    return int(device.removeprefix("cuda:"))


def _count_of(role: Role, count: int, num_ranks: int) -> str:
    return role.value if num_ranks == 1 else f"{count} of {num_ranks} ranks of the {role.value}"
