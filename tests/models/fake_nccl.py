"""Doubles of torch's NCCL group: one whose ranks are threads, and one whose device hangs until it is aborted."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

DEADLINE_SECONDS = 20.0


class Work:
    """Done when it is made, or, on a device that hangs, never; `wait` does not wait, as NCCL's does not."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        del timeout
        return True


class Table:
    """What `size` ranks bring to each exchange."""

    def __init__(self, size: int) -> None:
        self.parts: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)


class FakeNccl:
    """One rank's end. Notes its exchanges as (kind, dtype)."""

    def __init__(self, table: Table, rank: int) -> None:
        self._table, self._rank = table, rank
        self.exchanges: list[tuple[str, torch.dtype]] = []

    def _allgather_base(self, parts: Tensor, part: Tensor, options: Any) -> Work:
        assert not options.asyncOp, "NCCL would use a stream beside the current one"
        self.exchanges.append(("all-gather", part.dtype))
        parts.copy_(torch.cat(self._everybodys(part)))
        return Work()

    def allreduce(self, parts: list[Tensor], options: Any) -> Work:
        assert not options.asyncOp, "NCCL would use a stream beside the current one"
        self.exchanges.append(("all-reduce", parts[0].dtype))
        parts[0].copy_(torch.stack(self._everybodys(parts[0].clone())).sum(0))
        return Work()

    def _everybodys(self, part: Tensor) -> list[Tensor]:
        self._table.parts[self._rank] = part
        self._table.barrier.wait(DEADLINE_SECONDS)
        parts = list(self._table.parts)
        self._table.barrier.wait(DEADLINE_SECONDS)
        return parts


class HangingNccl:
    """A device whose exchanges do not end before they are aborted, and an abort that waits for graphs."""

    def __init__(self, graphs_destroyed: threading.Event | None = None, store: object = None) -> None:
        self._graphs_destroyed = graphs_destroyed
        self._store = store
        """Kept, as by a real group: a store that ends while others remove its folder may wait for a file in it."""
        self.kernels_ended = threading.Event()
        self.num_aborts = 0

    def _allgather_base(self, parts: Tensor, part: Tensor, options: Any) -> Work:
        del parts, part, options
        return Work()

    def abort(self) -> None:
        self.num_aborts += 1
        self.kernels_ended.set()
        if self._graphs_destroyed is not None:
            self._graphs_destroyed.wait(DEADLINE_SECONDS)
