"""A process group of torch for the ranks of one model, and nobody else.

It is made directly and registered nowhere: there is no default group, and other roles never join. Wherever the ranks
have a GPU each it is NCCL, otherwise gloo over the loopback interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from amusd.errors import RankLostError
from amusd.types import Role

Backend: TypeAlias = Literal["gloo", "nccl"]

EXCHANGE_SECONDS = 60.0
"""Longest that one rank waits for the others in the middle of a pass."""


def backend_for(devices: Sequence[str]) -> Backend:
    """What connects ranks on these devices. NCCL refuses two ranks on one GPU."""
    on_gpus = all(device.startswith("cuda") for device in devices)
    return "nccl" if on_gpus and len(set(devices)) == len(devices) else "gloo"


class ProcessGroup:
    """The ranks of one role that have met through one file."""

    def __init__(self, file: Path, role: Role, rank: int, size: int, device: str, backend: Backend) -> None:
        """Meet the others; returns once all have come. Raises `RankLostError` after `EXCHANGE_SECONDS`."""
        self._role = role
        self._size = size
        try:
            self._group = _make(file, rank, size, backend)
            self.gather(torch.zeros(1, device=device))  # NCCL meets in its first exchange
        except RuntimeError as error:
            raise RankLostError(f"the ranks of the {role.value} did not meet: {_first_line(error)}") from None

    def gather(self, part: Tensor) -> list[Tensor]:
        """See `Ranks.gather`. Raises `RankLostError` when another rank is gone or silent; this one is spent then."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self._size)]
        try:
            self._group.allgather([parts], [part]).wait()
        except RuntimeError as error:
            line = _first_line(error)
            raise RankLostError(f"the ranks of the {self._role.value} have lost each other: {line}") from None
        return parts


def _make(file: Path, rank: int, size: int, backend: Backend) -> Any:
    from torch import distributed

    store = distributed.FileStore(str(file), size)  # type: ignore[attr-defined]  # missing in its __all__
    timeout = timedelta(seconds=EXCHANGE_SECONDS)
    if backend == "nccl":
        nccl: Any = distributed.ProcessGroupNCCL
        settings = nccl.Options()
        settings._timeout = timeout  # noqa: SLF001 - no public name
        return nccl(store, rank, size, settings)
    gloo: Any = distributed.ProcessGroupGloo
    settings = gloo._Options()  # noqa: SLF001 - no public name
    settings._timeout = timeout  # noqa: SLF001 - no public name
    settings._devices = [gloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001 - no public name
    return gloo(store, rank, size, settings)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
