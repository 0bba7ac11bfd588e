"""Where the ranks of one model meet. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What a rank knows of the others before they are linked."""

    address: str
    """A private folder on one machine, else `tcp://HOST:PORT`; rank R uses port PORT + R."""
    host: str = LOOPBACK
    store: Any = None
    """torch's store for the process group; None: a file in the folder."""
    failure: Callable[[int, float], Exception | None] = lambda _rank, _timeout: None
    """Why a rank's process, started here, failed within so many seconds."""
    stop: Callable[[], None] = lambda: None
