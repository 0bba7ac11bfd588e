"""Doubles of torch's NCCL group: one whose ranks are threads, and one whose device hangs until it is aborted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

DEADLINE_SECONDS = 20.0


class Work:
    """An exchange with `asyncOp`, on a stream beside the current one: its result is there after `wait`.

    As torch's, NCCL returns no such object without `asyncOp`.
    """

    def __init__(self, finish: Callable[[], object] = lambda: None) -> None:
        self._finish = finish

    def wait(self, _timeout: timedelta | None = None) -> bool:
        self._finish()
        return True


class Table:
    def __init__(self, size: int) -> None:
        self.parts: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)


class FakeNccl:
    def __init__(self, table: Table, rank: int) -> None:
        self._table, self._rank = table, rank

    def _allgather_base(self, parts: Tensor, part: Tensor, options: Any) -> Work | None:
        self._table.parts[self._rank] = part
        self._table.barrier.wait(DEADLINE_SECONDS)
        found = torch.cat(self._table.parts)
        self._table.barrier.wait(DEADLINE_SECONDS)
        if options.asyncOp:
            return Work(lambda: parts.copy_(found))
        parts.copy_(found)
        return None

    def abort(self) -> None:
        """Nothing hangs here."""


class HangingNccl:
    """A device whose exchanges, after the first, do not end before they are aborted; an abort waits for graphs."""

    def __init__(self, graphs_destroyed: threading.Event | None = None) -> None:
        self._graphs_destroyed = graphs_destroyed
        self.kernels_ended = threading.Event()
        self.num_aborts = 0

    def _allgather_base(self, parts: Tensor, part: Tensor, options: Any) -> Work | None:
        del parts, part
        return Work() if options.asyncOp else None

    def abort(self) -> None:
        self.num_aborts += 1
        self.kernels_ended.set()
        if self._graphs_destroyed is not None:
            self._graphs_destroyed.wait(DEADLINE_SECONDS)
