"""Where the ranks of one model meet. Imports no torch."""

from __future__ import annotations

from typing import Any

LOOPBACK = "127.0.0.1"


class Meeting:
    """What a rank knows of the others before they are linked."""

    def __init__(self, address: str, host: str = LOOPBACK, store: Any = None) -> None:
        """`address`: a private folder on one machine, else `tcp://HOST:PORT`, where rank R uses port PORT + R.

        `host`: this machine's, for gloo. `store`: torch's, for the process group; None: a file in the folder.
        """
        self.address = address
        self.host = host
        self.store = store

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that were started here."""
        return []

    def failure(self, _rank: int, _timeout: float, /) -> Exception | None:
        """Why a rank's process, started here, failed within so many seconds."""
        return None

    def stop(self) -> None:
        """End the processes of ranks that were started here. Idempotent."""
