"""Ranks that are threads of one process: the same work in each, with a table between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from amusd.models.passes import Pass
from amusd.models.sharding import Ranks

T = TypeVar("T")
DEADLINE_SECONDS = 30.0


class ThreadRanks:
    captures = False

    def __init__(self, rank: int, table: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(table)
        self._table, self._barrier = table, barrier

    def sum(self, part: Tensor) -> Tensor:
        return torch.stack(self._gather(part)).float().sum(0)

    def join(self, part: Tensor) -> Tensor:
        return torch.cat(self._gather(part), dim=-1)

    def check(self) -> None:
        """A thread does not get lost."""

    def abort(self) -> None:
        """There is no device."""

    def _gather(self, part: Tensor) -> list[Tensor]:
        self._table[self.rank] = part
        self._barrier.wait(DEADLINE_SECONDS)
        parts = [entry for entry in self._table if entry is not None]
        self._barrier.wait(DEADLINE_SECONDS)
        assert len({(entry.shape, entry.dtype) for entry in parts}) == 1
        return parts

    def announce(self, work: Pass) -> None:
        """Every thread does the same anyway."""


def on_ranks(size: int, work: Callable[[Ranks], T]) -> list[T]:
    barrier = threading.Barrier(size)
    table: list[Tensor | None] = [None] * size

    def run(rank: int) -> T:
        try:
            return work(ThreadRanks(rank, table, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
