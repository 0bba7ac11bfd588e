"""Ranks that meet in a folder, as those of one machine do."""

from __future__ import annotations

from pathlib import Path

from amusd.config import TransportConfig
from amusd.models.meeting import Meeting
from amusd.runtime.ranks import Follower, Leader
from amusd.transport.torch_distributed import Backend

DEADLINE_SECONDS = 30.0


def lead(folder: Path, size: int, backend: Backend = "gloo", meeting: Meeting | None = None) -> Leader:
    return Leader(TransportConfig(), meeting or Meeting(str(folder)), size, backend)


def come(folder: Path, rank: int, size: int, backend: Backend = "gloo") -> Follower:
    return Follower(TransportConfig(), Meeting(str(folder)), rank, size, backend)
