"""Advice on devices: a pure function of the machine and of the device of each rank.

It judges by what the driver says of the GPUs, not by measurement. An asynchronous pair gains from computing at the same
time, and every token waits for the target: the draft wants a GPU of its own, and the target the fastest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from amusd.config import EngineConfig
from amusd.runtime.gpus import Gpu
from amusd.runtime.placement import drafts_with_model, gpu_number, in_role, sharing
from amusd.types import Role

FASTER = 1.1
"""Least ratio at which a GPU counts as faster, or as larger."""
BUSY_BYTES = 1 << 30
"""Least memory in use with which a GPU counts as one that other processes use."""
BUSY_SHARE = 0.1
"""Least share of time with work on it that counts so as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The facts that the advice rests on."""

    gpus: Sequence[Gpu] = ()
    mps_folder: Path | None = None
    """The folder of an MPS daemon's pipes; None: there is none."""


@dataclass(frozen=True)
class _Placed:
    """A configuration on a machine."""

    config: EngineConfig
    devices: Sequence[str]
    machine: Machine

    @property
    def roles(self) -> list[Role]:
        """Those that have a model."""
        return [Role.TARGET, Role.DRAFT] if drafts_with_model(self.config) else [Role.TARGET]

    def of(self, role: Role) -> list[str]:
        """Devices of a role's ranks."""
        return in_role(self.devices, self.config, role)

    def gpus_of(self, *roles: Role) -> list[int]:
        """Numbers of the GPUs that these roles use, in order."""
        return sorted({gpu_number(device) for role in roles for device in self.of(role) if device != "cpu"})

    @property
    def free(self) -> list[int]:
        """Numbers of the GPUs that nobody uses, neither this configuration nor another process."""
        used = self.gpus_of(*self.roles)
        return [number for number, gpu in enumerate(self.machine.gpus) if number not in used and not _is_busy(gpu)]


def advise(config: EngineConfig, devices: Sequence[str], machine: Machine) -> list[str]:
    """Say in one line each what would run better elsewhere. `devices`: one for each rank, the target's first."""
    if not machine.gpus:
        return []
    placed = _Placed(config, devices, machine)
    return [line for look in (_free_gpus, _shared_gpus, _better_gpu, _busy_gpus, _no_peers) for line in look(placed)]


def _free_gpus(placed: _Placed) -> Iterator[str]:
    """A GPU is free, and a model is on a CPU or shares another GPU."""
    on_cpu = [role.value for role in placed.roles if "cpu" in placed.of(role)]
    what = f"{' and '.join(on_cpu)} on the CPU" if on_cpu else sharing(placed.config, placed.devices)
    if placed.free and what is not None:
        in_place = set(placed.devices) == {"cpu"}
        better = "hardware=auto" if in_place else _key(_spread_out(placed.devices, placed.free))
        yield f"{what}, while {_listed(placed.free)} free: {better}"


def _spread_out(devices: Sequence[str], free: Sequence[int]) -> list[str]:
    """`devices` with a free GPU, while there are any, for each rank on a CPU or on the GPU of an earlier rank."""
    left, placed = list(free), list[str]()
    for device in devices:
        moves = left and (device == "cpu" or device in placed)
        placed.append(f"cuda:{left.pop(0)}" if moves else device)
    return placed


def _shared_gpus(placed: _Placed) -> Iterator[str]:
    """Ranks share a GPU, and none is free."""
    if placed.free:
        return
    for role in placed.roles:
        devices, gpus = placed.of(role), placed.gpus_of(role)
        if len(gpus) < len(devices) and "cpu" not in devices:
            yield (
                f"{len(devices)} ranks of the {role.value} on {_names(gpus)}: ranks of one model gain nothing on a GPU "
                f"that they share: {role.value}_tensor_parallel_size={len(gpus)}"
            )
    both = set(placed.gpus_of(Role.TARGET)) & set(placed.gpus_of(Role.DRAFT)) if Role.DRAFT in placed.roles else set()
    if both and placed.machine.mps_folder is None:
        yield (
            f"target and draft share {_names(sorted(both))}, which without MPS computes for one process at a time, so "
            "running ahead gains little or nothing: docs/one_gpu.md says how to start MPS, and `amusd compare` whether "
            "mode=synchronous is as fast"
        )
    elif both:
        yield (
            f"target and draft share {_names(sorted(both))}, and compute at the same time with the MPS daemon of "
            f"{placed.machine.mps_folder}; but a fault or a kill of one can end the other (docs/one_gpu.md)"
        )


def _better_gpu(placed: _Placed) -> Iterator[str]:
    """The target has no part of the fastest GPUs, or of the largest where they are as fast."""
    gpus, targets = placed.machine.gpus, placed.gpus_of(Role.TARGET)
    others = sorted({*placed.free, *placed.gpus_of(*placed.roles)} - {*targets})
    if not targets or not others:
        return
    worst = min(targets, key=lambda number: _quality(gpus[number]))
    best = max(others, key=lambda number: _quality(gpus[number]))
    why = _advantage(gpus[best], gpus[worst])
    if why is not None:
        swap = {f"cuda:{worst}": f"cuda:{best}", f"cuda:{best}": f"cuda:{worst}"}
        better = [swap.get(device, device) for device in placed.devices]
        yield (
            f"the target is on cuda:{worst} ({gpus[worst]}), and cuda:{best} ({gpus[best]}) {why}; each token waits "
            f"for the target: {_key(better)}"
        )


def _quality(gpu: Gpu) -> tuple[float, int]:
    return gpu.bandwidth or 0.0, gpu.memory_bytes


def _advantage(gpu: Gpu, other: Gpu) -> str | None:
    """The reason why `gpu` is better for the target; None without one."""
    if gpu.bandwidth is not None and other.bandwidth is not None:
        ratio = gpu.bandwidth / other.bandwidth
        if ratio >= FASTER:
            return f"reads its memory {ratio:.1f} times as fast"
        if ratio <= 1 / FASTER:
            return None
    return "has more memory" if gpu.memory_bytes >= FASTER * other.memory_bytes else None


def _busy_gpus(placed: _Placed) -> Iterator[str]:
    """Other processes use the same GPU."""
    for number in placed.gpus_of(*placed.roles):
        gpu = placed.machine.gpus[number]
        if _is_busy(gpu):
            who = " and ".join(role.value for role in placed.roles if number in placed.gpus_of(role))
            uses = [] if gpu.used_bytes is None else [f"hold {gpu.used_bytes / 2**30:.1f} GiB of it"]
            uses += [] if gpu.busy is None else [f"computed for {100 * gpu.busy:.0f} % of the last second"]
            free = f"; {_listed(placed.free)} free" if placed.free else ""
            yield f"{who} on cuda:{number}: other processes {' and '.join(uses)}{free}"


def _is_busy(gpu: Gpu) -> bool:
    return (gpu.used_bytes or 0) > BUSY_BYTES or (gpu.busy or 0.0) > BUSY_SHARE


def _no_peers(placed: _Placed) -> Iterator[str]:
    """Messages between ranks have to be copied through the host's memory."""
    for role in placed.roles:
        gpus = placed.gpus_of(role)
        if _strangers(placed.machine.gpus, gpus):
            yield (
                f"{_names(gpus)} cannot reach each other's memory: what the ranks of the {role.value} exchange in "
                "every layer goes through the host"
            )
    ends = sorted({gpu_number(device) for device in (placed.devices[0], placed.devices[-1]) if device != "cpu"})
    if Role.DRAFT in placed.roles and _strangers(placed.machine.gpus, ends):
        loses = (
            "which transport=nccl needs to gain anything"
            if placed.config.transport.kind == "nccl"
            else ("which costs nothing: messages are short and go through the host")
        )
        yield f"{_names(ends)}, of target and draft, cannot reach each other's memory, {loses}"


def _strangers(gpus: Sequence[Gpu], numbers: Sequence[int]) -> bool:
    """Whether any two of these are without peer access."""
    return any(other not in gpus[number].peers for number in numbers for other in numbers if other != number)


def _key(devices: Sequence[str]) -> str:
    return f"hardware.devices=[{','.join(devices)}]"


def _names(numbers: Sequence[int]) -> str:
    return ", ".join(f"cuda:{number}" for number in numbers)


def _listed(numbers: Sequence[int]) -> str:
    """`cuda:1 is`, `cuda:1, cuda:2 are`."""
    return f"{_names(numbers)} {'is' if len(numbers) == 1 else 'are'}"
