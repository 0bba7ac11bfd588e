"""The devices of this machine, one for each rank: the target's first, the draft's last.

GPUs of the machine                the target's ranks         the draft
none                               on the CPU                 on the CPU
one for each rank, or more         on the first ones          on the next one
one for each rank of the target    on the first ones          on the last one, which the target has too
fewer                              spread over all of them    on the last one, which the target has too
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

from amusd.config import EngineConfig, HardwareConfig
from amusd.errors import ConfigError
from amusd.logs import logger
from amusd.types import Role


def count_gpus() -> int:
    """GPUs of this process, AMD's too; 0 with a torch for CPUs.

    Creates no context, so this process may fork afterwards; `torch.cuda.is_available` would start the driver. On Linux
    without a driver, torch, which takes seconds, is not imported.
    """
    has_driver = any(Path("/dev", name).exists() for name in ("nvidiactl", "kfd", "dxg"))
    if "torch" not in sys.modules and sys.platform.startswith("linux") and not has_driver:
        return 0
    import torch

    return torch.cuda.device_count()


def devices_of(config: EngineConfig) -> tuple[str, ...]:
    """Device of each rank, the target's first: as configured, else placed on this machine's GPUs.

    A draft that computes nothing on a GPU is on the CPU: a GPU's context takes 500 MB, and cannot be forked.
    """
    found = config.hardware.devices or place(count_gpus(), config.target_tensor_parallel_size)
    if len(found) != config.num_ranks:
        found = found[:1] * config.num_ranks
    return (*found[:-1], "cpu") if all(drafter.kind == "ngram" for drafter in config.drafters) else found


def place(num_gpus: int, num_target_ranks: int) -> tuple[str, ...]:
    """Device of each rank, by the table above."""
    if num_gpus == 0:
        return ("cpu",) * (num_target_ranks + 1)
    num_used = min(num_target_ranks, num_gpus)
    targets = [f"cuda:{rank * num_used // num_target_ranks}" for rank in range(num_target_ranks)]
    return (*targets, f"cuda:{min(num_target_ranks, num_gpus - 1)}")


def device_of(config: EngineConfig, role: Role, rank: int = 0) -> str:
    """Device of one rank of a role."""
    return devices_of(config)[rank if role == "target" else -1]


def link_devices(config: EngineConfig) -> tuple[str, str]:
    """Devices of the link's ends: the target's first rank, and the draft."""
    return device_of(config, "target"), device_of(config, "draft")


def sharing(config: EngineConfig, devices: Sequence[str]) -> str | None:
    """The shared GPUs, as `2 workers share cuda:0`; None without any."""
    has_draft = any(drafter.can.has_model or drafter.can.needs_features for drafter in config.drafters)
    counts = Counter(devices if has_draft and config.draft_address is None else devices[:-1])
    shared = [f"{count} workers share {device}" for device, count in counts.items() if count > 1 and device != "cpu"]
    return ", ".join(shared) or None


def free_bytes(device: str) -> int:
    """Free memory of a device. Creates a GPU's context."""
    if device != "cpu":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def warn_of_sharing(config: EngineConfig) -> None:
    """Warn if workers share a GPU that no setting named."""
    if not config.hardware.devices and (shared := sharing(config, devices_of(config))):
        logger.warning("%s; each waits while the other computes (docs/one_gpu.md)", shared)


def with_devices(config: EngineConfig) -> HardwareConfig:
    """The hardware of `config` with every rank's device named. Raises `ConfigError` for a missing GPU."""
    devices = devices_of(config)
    check_devices(devices)
    return dataclasses.replace(config.hardware, devices=devices)


def check_devices(devices: Sequence[str]) -> None:
    """Raise `ConfigError` for a missing GPU. Creates no context."""
    if (why := why_missing(devices)) is not None:
        raise ConfigError(f"hardware.devices={list(devices)}: {why}")


def why_missing(devices: Sequence[str]) -> str | None:
    """Why a GPU is missing; None if all exist. Creates no context."""
    numbers = [int(device.removeprefix("cuda:")) for device in devices if device != "cpu"]
    if not numbers or max(numbers) < (num_gpus := count_gpus()):
        return None
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"the installed torch ({torch.__version__}) is one for CPUs; install one for CUDA, or use the CPU"
    if num_gpus == 0:
        return "torch finds no GPU; see what `nvidia-smi` lists and CUDA_VISIBLE_DEVICES hides, or use the CPU"
    return f"there is no cuda:{max(numbers)}; allowed: cpu, cuda:0 to cuda:{num_gpus - 1}"


def claim_device(config: EngineConfig, role: Role, rank: int = 0) -> str:
    """Make a rank's device this thread's current one, before all other CUDA use; return it.

    Raises `ConfigError` for a GPU that is full or in use, or whose driver is too old.
    """
    device = device_of(config, role, rank)
    if device != "cpu":
        import torch

        from amusd.checkpoints.building import device_errors

        # Otherwise events, streams and pinned memory, which name no device, open a context on cuda:0: 500 MB of
        # another worker's GPU. CUDA_VISIBLE_DEVICES is no way out: every GPU would be called cuda:0, in messages and
        # logs too, and NCCL would not find the peer's GPU.
        with device_errors(device):
            torch.cuda.set_device(device)
    return device
