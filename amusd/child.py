"""Child processes: each life is forked from a server, which has loaded what all of them need.

Only a process with one thread and no GPU can be forked; where `prepare` returns None, each life is a new process.
`Lives` is the parent's end, `serve` the child's; lines of JSON go over a socket, the child's standard input:

    parent: the settings, once; then the orders of one life after another
    child:  {"pid": of the life}, {"said": a text}, {"pid", "ended": exit code, or minus the signal}, with the life's
            number

When the parent closes the socket or ends, all of its lives end.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from amusd.huge_pages import environment_with_huge_pages

Orders = dict[str, Any]

_EXIT_SECONDS = 5.0
_CHUNK_BYTES = 65_536
_STANDARD_INPUT = 0
_PROGRAM = """\
import sys
sys.path = [folder for folder in sys.path if folder]
if {package!r} not in sys.path:
    sys.path.insert(0, {package!r})
from {module} import main
main()
"""


def command_of(module: str) -> list[str]:
    """The command that runs `main()` of a module of this package, whatever the current directory holds."""
    package = str(Path(__file__).absolute().parents[1])
    return [sys.executable, "-c", _PROGRAM.format(package=package, module=module)]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A life that is over."""

    pid: int
    code: int
    """Exit code, or minus the signal."""
    said: str


class Lives:
    """The parent's end: one life at a time, from a server that is restarted if lost."""

    def __init__(self, command: Sequence[str]) -> None:
        """`command`: starts a process that calls `serve`; its standard output is dropped."""
        self._command = list(command)
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._unread = b""
        self._pid: int | None = None
        self._number = 0
        self._said = ""
        self._end: Ended | None = None
        if hasattr(os, "register_at_fork"):  # or a fork of this process would hold the socket open
            own = weakref.WeakMethod(self._hang_up)
            os.register_at_fork(after_in_child=lambda: (hang_up := own()) is not None and hang_up())

    @property
    def pid(self) -> int | None:
        """Process id of the newest life, or of the server that prepares for it."""
        self.ended(0.0)
        return self._pid or (None if self._server is None else self._server.pid)

    @property
    def is_preparing(self) -> bool:
        """Whether there is a server without a life yet."""
        return self._server is not None and self._pid is None

    def prepare(self, settings: Mapping[str, Any]) -> None:
        """Start the server if needed, without waiting."""
        if self._socket is not None and self._server is not None and self._server.poll() is None:
            return
        self.close()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(
                self._command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment_with_huge_pages()
            )
        self._unread, self._pid, self._end = b"", None, None
        self._send(settings)

    def start(self, orders: Mapping[str, Any]) -> None:
        """Order the next life, without waiting; the last one has ended."""
        self._pid, self._said, self._end = None, "", None
        self._number += 1
        self._send({**orders, "life": self._number})

    def ended(self, timeout: float) -> Ended | None:
        """How the newest life ended; None if not within `timeout` seconds (0 polls)."""
        deadline = time.monotonic() + timeout
        while self._end is None and self._socket is not None:
            self._socket.settimeout(_left(deadline))
            try:
                self._take(self._socket.recv(_CHUNK_BYTES))
            except (BlockingIOError, TimeoutError):
                return None
            except ConnectionError:
                self._hang_up()
        if self._end is None and self._server is not None:  # it has closed the socket, but may not have ended yet
            try:
                code = self._server.wait(_left(deadline))
            except subprocess.TimeoutExpired:
                return None
            self._end = Ended(pid=self._pid or self._server.pid, code=code, said=self._said)
        return self._end

    def kill(self) -> None:
        """Kill the newest life, or the server that prepares for it, without waiting."""
        if self._server is not None and self.ended(0.0) is None:
            self._server.send_signal(signal.SIGCONT)  # one that was stopped could not report the end
            with suppress(ProcessLookupError):
                os.kill(self._pid or self._server.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the server and its life. Idempotent."""
        self._hang_up()
        if self._server is not None:
            self._server.send_signal(signal.SIGCONT)
            try:
                self._server.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                self._server.kill()
                with suppress(subprocess.TimeoutExpired):  # it is stuck in the kernel
                    self._server.wait(_EXIT_SECONDS)

    def _send(self, values: Mapping[str, Any]) -> None:
        if self._socket is not None:
            self._socket.settimeout(None)
            with suppress(OSError):  # the server has just ended, which `ended` finds
                self._socket.sendall(json.dumps(values).encode() + b"\n")

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _take(self, data: bytes) -> None:
        if not data:
            self._hang_up()
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            report = json.loads(line)
            if report["life"] != self._number:  # of one that was given up
                continue
            self._said += report.get("said", "")
            self._pid = report.get("pid", self._pid)
            if "ended" in report:
                self._end = Ended(pid=report["pid"], code=report["ended"], said=self._said)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


class Channel:
    """The child's end of the socket."""

    life = 0

    def lines(self) -> Iterator[Orders]:
        """The settings, then each life's orders, until the parent hangs up."""
        with open(_STANDARD_INPUT, encoding="utf-8", closefd=False) as lines, suppress(ConnectionError):
            for line in lines:
                yield json.loads(line)

    def say(self, text: str) -> None:
        """Tell the parent, which finds it in `Ended.said`."""
        self.report(said=text)

    def report(self, **fields: object) -> None:
        """Write one line to the parent, if it is there."""
        with suppress(OSError):
            os.write(_STANDARD_INPUT, json.dumps({"life": self.life, **fields}).encode() + b"\n")

    def await_hang_up(self, *others: int) -> bool:
        """Wait until the parent is gone, or one of `others` (descriptors) is readable; whether the parent is gone."""
        waiting = select.poll()
        waiting.register(_STANDARD_INPUT, 0)  # a hang-up is told unasked
        for descriptor in others:
            waiting.register(descriptor, select.POLLIN)
        return any(descriptor == _STANDARD_INPUT for descriptor, _ in waiting.poll())

    def on_hang_up(self, react: Callable[[], object]) -> None:
        """Call `react` in another thread when the parent is gone."""
        threading.Thread(target=lambda: self.await_hang_up() and react(), name="parent", daemon=True).start()


def serve(prepare: Callable[[Orders], Any], live: Callable[[Channel, Orders, Orders, Any], int]) -> int:
    """Run `live` for each line of orders, and return this process's exit code.

    `prepare` gets the settings; `live` gets them, its orders and what was prepared, and returns an exit code. It runs
    in a fork; if None was prepared, in this process, once.
    """
    channel = Channel()
    lines = channel.lines()
    settings = next(lines, None)
    if settings is None:
        return 0
    prepared = prepare(settings)
    if prepared is not None:
        gc.collect()
        gc.freeze()  # or a collection in a life would write to, and so copy, all that it shares
    for orders in lines:
        channel.life = orders.pop("life")
        if prepared is None:
            channel.report(pid=os.getpid())
            return live(channel, settings, orders, None)
        pid = os.fork()
        if pid == 0:
            _run(channel, partial(live, channel, settings, orders, prepared))
        channel.report(pid=pid)
        channel.report(pid=pid, ended=_await_end(channel, pid))
    return 0


@contextmanager
def ending_with_parent() -> Iterator[None]:
    """End this process if the parent goes while it prepares. Leaves no thread, since a fork follows."""
    reading, writing = os.pipe()
    watch = threading.Thread(target=lambda: Channel().await_hang_up(reading) and os._exit(0), daemon=True)
    watch.start()
    try:
        yield
    finally:
        os.close(writing)
        watch.join()
        os.close(reading)


def _run(channel: Channel, live: Callable[[], int]) -> None:
    code = 1
    try:
        channel.report(pid=os.getpid())  # before anybody can have met it
        code = live()
    except BaseException:  # noqa: BLE001 - the end of the process: told in full, and the exit code says so
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _await_end(channel: Channel, pid: int) -> int:
    """The exit code of a forked life, or minus the signal that ended it. It does not outlive the parent."""
    life = os.pidfd_open(pid)
    if channel.await_hang_up(life):
        os.kill(pid, signal.SIGKILL)
    os.close(life)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def ignore_terminal() -> None:
    """Leave Ctrl-C and a lost terminal to the parent, which ends this process."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
