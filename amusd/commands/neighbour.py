"""A process that computes as the other worker does, to measure by how much it slows this one."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typing_extensions import Self

from amusd.child import command_of
from amusd.errors import PeerLostError
from amusd.runtime.cores import pin_to

READY_SECONDS = 60.0
_SIZE = 4096
"""Rows and columns of the float32 weight, which no cache holds."""
_WORK, _REST = b"w", b"r"


class Neighbour:
    """Products on the other worker's device. It rests until told to work."""

    def __init__(self, device: str, cores: set[int]) -> None:
        """Start the process. `cores`: its own; empty: any."""
        command = [*command_of(__name__), json.dumps([device, sorted(cores)])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._process.kill()
        self._process.communicate()

    @contextmanager
    def works(self) -> Iterator[None]:
        """It computes meanwhile. Raises `PeerLostError` when it has ended, or is silent for `READY_SECONDS`."""
        orders, answers = self._process.stdin, self._process.stdout
        assert orders is not None
        assert answers is not None
        orders.write(_WORK)
        if not select.select([answers], [], [], READY_SECONDS)[0] or not answers.read(1):
            raise PeerLostError("the process beside which passes are timed does not compute")
        yield
        orders.write(_REST)


def main() -> None:
    """Be that process: compute while told to, until the parent ends."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent, which ends this process
    device, cores = json.loads(sys.argv[-1])
    pin_to(set(cores))
    torch.set_num_threads(max(1, len(cores)))
    rows, weight = (torch.rand(number, _SIZE, device=device) for number in (4, _SIZE))
    with Path("/dev/stdin").open("rb", buffering=0) as orders:
        while order := orders.read(1):
            if order == _WORK:
                sys.stdout.buffer.write(_WORK)
                sys.stdout.flush()
            while order == _WORK and not select.select([orders], [], [], 0.0)[0]:
                (rows @ weight).sum().item()
