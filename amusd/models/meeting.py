"""Where the ranks of one model meet. Imports no torch, for which whoever starts them would wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What a rank knows of the others before it has a link to them."""

    address: str
    """On one machine a folder that only this user can enter; else `tcp://HOST:PORT`: rank R uses port PORT + R."""
    host: str = LOOPBACK
    """Address of this machine at which gloo listens."""
    store: Any = None
    """Store of torch in which the process group is formed; None: a file in the folder."""
    failure: Callable[[int, float], Exception | None] = lambda _rank, _timeout: None
    """Why a rank's process, started by this one, has failed within so many seconds."""
    stop: Callable[[], None] = lambda: None
    """Ends the other ranks' processes, if this one has started them."""
