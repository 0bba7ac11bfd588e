"""Starts and ends the draft as a child process of the target's: how `Engine.launch` makes a pair from Python.

The child gets its orders as one JSON line on standard input; the end of that pipe tells it that the parent is gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from typing import IO

import torch

from amusd.config import EngineConfig, from_mapping, to_mapping
from amusd.runtime.cores import allowed_cores, cores_for, pin_to
from amusd.runtime.startup import device_of, make_recorder, serve_draft
from amusd.transport.base import Rendezvous
from amusd.types import Role

STOP_SECONDS = 2.0
"""How long a draft may take to end by itself before it is killed."""


class DraftProcess:
    """One child process that drafts."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int | None:
        """Process id, once started."""
        return None if self._process is None else self._process.pid

    def start(self, rendezvous: Rendezvous) -> None:
        """Start the child; does not wait for it. Its standard error is the caller's."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "amusd.runtime.supervisor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        orders = {"config": to_mapping(self._config), "rendezvous": asdict(rendezvous)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(orders) + "\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """End the child: wait for its own end, else kill it. Idempotent."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        finally:
            process.stdin.close()


def main() -> None:
    """The child's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent, which ends this process
    orders = json.loads(sys.stdin.readline())
    config = from_mapping(EngineConfig, orders["config"])
    threading.Thread(target=_end_with, args=(sys.stdin,), daemon=True).start()
    if device_of(config.hardware, Role.DRAFT) == "cpu":
        pin_to(cores_for(Role.DRAFT, allowed_cores(), config.hardware))
    torch.set_num_threads(config.hardware.num_threads)
    serve_draft(config, Rendezvous(**orders["rendezvous"]), make_recorder(Role.DRAFT), incarnation=1)


def _end_with(pipe: IO[str]) -> None:
    """Leave when the parent does: nobody is left to draft for, and nobody would end this process."""
    pipe.read()
    os._exit(0)


if __name__ == "__main__":
    main()
