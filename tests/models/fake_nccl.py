"""A double of torch's NCCL group, which needs a GPU."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

from torch import Tensor

DEADLINE_SECONDS = 20.0


class FakeNccl:
    """A group whose ranks all send the same. Its kernels end on an abort, which waits for graphs.

    As in torch, each exchange takes a lock that an abort holds until it returns.
    """

    def __init__(self, graphs_destroyed: threading.Event | None = None) -> None:
        self._graphs_destroyed = graphs_destroyed
        self._mutex = threading.Lock()
        self.kernels_ended = threading.Event()
        self.num_aborts = 0

    def _allgather_base(self, parts: Tensor, part: Tensor, options: Any) -> Mock | None:
        """Returns work to wait for only with `asyncOp`, as torch does."""
        if options.asyncOp:  # the first, whose result is not used
            return Mock()
        with self._mutex:
            parts.view(-1, *part.shape).copy_(part)
        return None

    def alltoall_base(self, all_rows: Tensor, rows: Tensor, _: list[int], sent: list[int], options: Any) -> Mock | None:
        with self._mutex:
            all_rows.view(len(sent), -1, *rows.shape[1:]).copy_(rows[: sent[0]])  # to rank 0, whose share is not larger
        return Mock() if options.asyncOp else None

    def abort(self) -> None:
        self.num_aborts += 1
        self.kernels_ended.set()
        with self._mutex:
            if self._graphs_destroyed is not None:
                self._graphs_destroyed.wait(DEADLINE_SECONDS)
