"""Processes that this package starts and that import the parent's very own copy of it: the parent's end.

`command_of` starts one. `Lives` starts one process after another from one that has loaded, once, what all of them need.
What the two say to each other, each a line of JSON over a socket that is the child's standard input:

    parent: settings, once (`prepare`); then the orders of each life (`start`)
    child:  {"pid": of that life}, {"said": a text}, {"pid", "ended": exit code, or minus the signal that ended it}

A forked life reports its own exit code, and the server reports it again; so a server that is stopped or killed holds
nothing up. The end of the socket is the end of them all. `fork_server.py` is the other end.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_EXIT_SECONDS = 5.0
"""How long a process may take to go whose every descriptor is closed, or that was killed."""
_REPORT_SECONDS = 1.0
"""How long a server may take to tell that a life was killed; one that a signal has stopped never does."""
_CHUNK_BYTES = 65_536


def command_of(module: str) -> list[str]:
    """Return the command of a process that runs `main()` of this module of the package."""
    return [sys.executable, str(Path(__file__).absolute().with_name("fork_server.py")), module]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A life that is over."""

    pid: int
    code: int
    """Its exit code; minus the signal that ended it."""
    said: str
    """All that it wrote with `Channel.say`."""


class Lives:
    """One life at a time, each from a server that is started again if it was lost."""

    def __init__(self, command: Sequence[str], *, is_quiet: bool = False) -> None:
        """`command`: starts a process that calls `serve`. `is_quiet`: its standard output is dropped."""
        self._command = list(command)
        self._stdout = subprocess.DEVNULL if is_quiet else None
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._unread = b""
        self._pid: int | None = None
        self._said = ""
        self._end: Ended | None = None
        self._report_due = math.inf
        self._has_settings = False
        if hasattr(os, "register_at_fork"):  # or the line would be open for as long as a fork of this process lives
            own = weakref.WeakMethod(self._hang_up)
            os.register_at_fork(after_in_child=lambda: (hang_up := own()) is not None and hang_up())

    @property
    def pid(self) -> int | None:
        """Process id of the newest life, or of the server as long as that prepares for it; None before the first."""
        self.ended(0.0)
        return self._pid or (None if self._server is None else self._server.pid)

    @property
    def is_preparing(self) -> bool:
        """Whether there is a server, and no life of it yet."""
        return self._server is not None and self._pid is None

    def open(self) -> None:
        """Start the server before its settings are known, unless there is one."""
        if self._channel is None or self._server is None or self._server.poll() is not None:
            self._start_server()
            self._pid, self._end, self._has_settings = None, None, False

    def prepare(self, settings: Mapping[str, Any]) -> None:
        """Start the server, which loads what `settings` say, unless there is one; does not wait for it."""
        self.open()
        if not self._has_settings:
            self._has_settings = True
            self._send(settings)

    def start(self, orders: Mapping[str, Any]) -> None:
        """The next life of a server that prepares or has prepared; does not wait for it. The last one has ended."""
        self._pid, self._said, self._end, self._report_due = None, "", None, math.inf
        self._send(orders)

    def ended(self, timeout: float | None) -> Ended | None:
        """How the newest life has ended, once it has; None when it has not within `timeout` seconds (0 polls)."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self._channel is not None and self._end is None:
            if time.monotonic() >= self._report_due and self._server is not None:
                self._report_due = math.inf
                self._server.kill()
            self._channel.settimeout(_left(min(deadline, self._report_due)))
            try:
                data = self._channel.recv(_CHUNK_BYTES)
            except (BlockingIOError, TimeoutError):
                if time.monotonic() >= deadline:
                    return None
                continue
            except ConnectionError:
                data = b""
            if data:
                self._take(data)
            else:
                self._hang_up()
        if self._end is None and self._server is not None:  # which has lost its end of the line, but may still be there
            try:
                code = self._server.wait(_left(deadline))
            except subprocess.TimeoutExpired:
                return None
            self._end = Ended(pid=self._pid or self._server.pid, code=code, said=self._said)
        return self._end

    def kill(self) -> bool:
        """Kill the newest life, or the server that prepares for it; does not wait. Returns whether it still ran."""
        if self._server is None or self.ended(0.0) is not None:
            return False
        did_run = _runs(self._pid or self._server.pid)
        if self._pid is None:
            self._server.kill()
        else:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._report_due = time.monotonic() + _REPORT_SECONDS
        return did_run

    def close(self) -> None:
        """End the server, and a life that has not ended. Idempotent."""
        self._hang_up()
        if self._server is None:
            return
        try:
            self._server.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()
            with suppress(subprocess.TimeoutExpired):  # it is stuck in the kernel
                self._server.wait(_EXIT_SECONDS)

    def _start_server(self) -> None:
        self.close()
        self._channel, theirs = socket.socketpair()
        try:
            self._server = subprocess.Popen(self._command, stdin=theirs.fileno(), stdout=self._stdout)
        finally:
            theirs.close()
        self._unread = b""

    def _send(self, values: Mapping[str, Any]) -> None:
        assert self._channel is not None, "a server was started"
        self._channel.settimeout(None)
        with suppress(OSError):  # the server has just ended, which `ended` finds
            self._channel.sendall(json.dumps(values).encode() + b"\n")

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _take(self, data: bytes) -> None:
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            report = json.loads(line)
            self._said += report.get("said", "")
            if "ended" not in report:
                self._pid = report.get("pid", self._pid)
            elif report["pid"] == self._pid and self._end is None:  # else told before, of this life or an earlier one
                self._end = Ended(pid=report["pid"], code=report["ended"], said=self._said)


def _runs(pid: int) -> bool:
    """Whether there is such a process, and it has not ended; True also where the system does not tell."""
    if not Path("/proc/self/stat").exists():
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def _left(deadline: float) -> float | None:
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())
