"""Ranks that meet in a folder, as those of one machine do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from amusd.config import TransportConfig
from amusd.models.meeting import Meeting
from amusd.models.process_group import Backend
from amusd.models.ranks import Follower, Leader
from amusd.transport.factory import numbered_link
from amusd.types import Role

DEADLINE_SECONDS = 30.0


def lead(
    folder: Path, size: int, backend: Backend = "gloo", failure: Callable[[float], Exception | None] = lambda _: None
) -> Leader:
    """The first rank, which awaits the others."""
    config, address = TransportConfig(), str(folder)
    links = [numbered_link(config, address, rank, Role.TARGET, listens=True) for rank in range(1, size)]
    return Leader(links, Meeting(address=address, failure=failure), backend)


def come(folder: Path, rank: int, size: int, backend: Backend = "gloo") -> Follower:
    """Another rank, on its way to the first one."""
    link = numbered_link(TransportConfig(), str(folder), rank, Role.TARGET, listens=False)
    return Follower(rank, size, link, Meeting(address=str(folder)), backend)
