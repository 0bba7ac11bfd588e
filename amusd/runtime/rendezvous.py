"""Where the ranks of one target meet, and the processes of those that were started here. Imports no torch."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

from amusd.child import ForkServer
from amusd.errors import RankLostError


class Rendezvous:
    """The address where the ranks meet, and the processes of ranks that were started here. For several threads."""

    def __init__(
        self, address: str, host: str = "127.0.0.1", store: Any = None, others: Sequence[ForkServer] = ()
    ) -> None:
        """`address`: a private folder on one machine, else `tcp://HOST:PORT`, where rank R uses port PORT + R.

        `host`: this machine's, for gloo. `store`: torch's, for the process group; None: a file in the folder.
        `others`: the processes of ranks 1 and up, if they were started here; `stop` ends them and removes the folder.
        """
        self.address = address
        self.host = host
        self.store = store
        self._others = others

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that were started here."""
        return [other.pid for other in self._others]

    def failure(self, rank: int, timeout: float, /) -> RankLostError | None:
        """The error of a rank's process that was started here and fails within `timeout` seconds; None: it did not."""
        if not self._others:
            return None
        end = self._others[rank - 1].ended(timeout)
        return RankLostError(end.in_words(f"rank {rank} of the target")) if end is not None and end.code else None

    def stop(self) -> None:
        """End the processes of ranks that were started here. Idempotent."""
        for other in self._others:
            other.close()
        if self._others:
            shutil.rmtree(self.address, ignore_errors=True)
