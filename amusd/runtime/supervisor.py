"""Starts, replaces and ends the draft as a child process of the target's: how `Engine.launch` makes a pair from Python.

The child gets its orders as one JSON line on standard input; the end of that pipe tells it that the parent is gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import IO

import torch

from amusd.child import command_of
from amusd.config import EngineConfig
from amusd.runtime.cores import allowed_cores, cores_for, pin_to
from amusd.runtime.startup import device_of, make_recorder, serve_draft
from amusd.settings import from_mapping, to_mapping
from amusd.transport.base import Rendezvous
from amusd.types import Role

STOP_SECONDS = 2.0
"""How long a draft may take to end by itself before it is killed."""


class DraftProcess:
    """One child process that drafts, at a time. Satisfies `DraftSource`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[str] | None = None
        self._incarnation = 0

    @property
    def pid(self) -> int | None:
        """Process id of the newest child, once started."""
        return None if self._process is None else self._process.pid

    def newest(self) -> int:
        """The child that runs; one more once it has ended."""
        has_ended = self._process is None or self._process.poll() is not None
        return self._incarnation + has_ended

    def ending(self, timeout: float, /) -> str | None:
        """See `DraftSource`."""
        if self._process is None:
            return None
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        who = f"the draft's process (pid {self._process.pid})"
        if code < 0:
            return f"{who} was killed by signal {-code}; if nobody sent it, see whether the memory is enough for both"
        return f"{who} ended with exit code {code}; mend what it says on standard error, and start again"

    def tell(self, incarnation: int, rendezvous: Rendezvous | None) -> None:
        """Start the child; does not wait for it. Its standard error is the caller's."""
        if rendezvous is None:
            return
        self.stop()  # it has ended, unless it is the first
        self._incarnation = incarnation
        self._process = subprocess.Popen(
            command_of(__name__),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        orders = {
            "config": to_mapping(self._config),
            "rendezvous": asdict(rendezvous),
            "incarnation": incarnation,
        }
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, which `newest` tells
            self._process.stdin.write(json.dumps(orders) + "\n")
            self._process.stdin.flush()

    def dismiss(self) -> None:
        """Kill the child; `newest` tells when it has ended."""
        if self._process is not None:
            self._process.kill()

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
            with suppress(BrokenPipeError):
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
    serve_draft(config, Rendezvous(**orders["rendezvous"]), make_recorder(Role.DRAFT), orders["incarnation"])


def _end_with(pipe: IO[str]) -> None:
    """Leave when the parent does: nobody is left to draft for, and nobody would end this process."""
    pipe.read()
    os._exit(0)
