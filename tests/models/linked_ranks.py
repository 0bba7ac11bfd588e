"""Ranks that meet in a folder, as those of one machine do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from amusd.config import TransportConfig
from amusd.models.sharding import Ranks
from amusd.runner.process_group import ProcessGroup
from amusd.runtime.ranks import Follower, Leader
from amusd.runtime.workers import Rendezvous
from amusd.transport.torch_distributed import Backend

T = TypeVar("T")
DEADLINE_SECONDS = 30.0


def lead(folder: Path, size: int, backend: Backend = "gloo", rendezvous: Rendezvous | None = None) -> Leader:
    return Leader(TransportConfig(), rendezvous or Rendezvous(str(folder)), size, backend)


def come(folder: Path, rank: int, size: int, backend: Backend = "gloo") -> Follower:
    return Follower(TransportConfig(), Rendezvous(str(folder)), rank, size, backend)


def on_ranks(folder: Path, size: int, work: Callable[[Ranks], T]) -> list[T]:
    """The result of `work` on each rank, each in a thread of its own."""
    ranks = [ProcessGroup(rank, size, str(folder)) for rank in range(size)]

    def run(rank: ProcessGroup) -> T:
        rank.form("cpu")
        return work(rank)

    with ThreadPoolExecutor(size) as pool:
        try:
            return list(pool.map(run, ranks))
        finally:
            for rank in ranks:
                rank.abort()
