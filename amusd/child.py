"""A fork server: it loads what its children need, and forks one child after another.

A process that uses a GPU cannot be forked: then `prepare` returns None, and the server itself is the only child.
`ForkServer` is the parent's end, and `serve` the server. Both exchange JSON over the server's standard input, a socket:

    parent: the settings, once; then the orders of one child after another
    server: [process id] of a started child; [process id, exit code or minus the signal] of an ended one

When the parent closes the socket or ends, the server and its child end.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from amusd.huge_pages import environment_with_huge_pages

Orders = dict[str, Any]

_EXIT_SECONDS = 5.0
_BINDINGS = {"GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"}
"""Variables that bind OpenMP's threads to the parent's cores."""
_STANDARD_INPUT = 0


def command_of(module: str) -> list[str]:
    """The command that runs `main()` of a module of this package, whatever the current directory holds."""
    folders = [*filter(None, sys.path), str(Path(__file__).absolute().parents[1])]
    return [sys.executable, "-c", f"import sys; sys.path = {folders}; from {module} import main; main()"]


class Ended(NamedTuple):
    """A child that has ended."""

    pid: int
    code: int
    """Exit code, or minus the signal."""

    def in_words(self, who: str) -> str:
        """One line for people."""
        how = f"ended with exit code {self.code}; mend what it says on standard error, and start again"
        if self.code < 0:
            how = f"was killed by signal {-self.code}; if nobody sent it, see whether there is enough memory"
        return f"{who} (pid {self.pid}) {how}"


class ForkServer:
    """The parent's end of a server. Any thread may use it."""

    def __init__(self, command: Sequence[str], settings: Mapping[str, Any]) -> None:
        """Start the server, without waiting. `command` calls `serve`; its standard output is dropped."""
        self._command, self._settings = command, settings
        self._lock = threading.RLock()
        self._pid: int | None = None
        self._end: Ended | None = None
        self._launch()

    @property
    def pid(self) -> int:
        """Process id of the newest child; the server's until the child has begun."""
        with self._lock:
            self.ended(0.0)
            return self._pid or self._process.pid

    @property
    def is_preparing(self) -> bool:
        """Whether there is no child yet."""
        return self._pid is None

    def start(self, orders: Mapping[str, Any]) -> None:
        """Order the next child, which starts once the last one has ended. Restarts an ended server. Does not wait."""
        with self._lock:
            if self._process.poll() is not None:
                self.close()
                self._launch()
            self._pid, self._end = None, None
            self._send(orders)

    def ended(self, timeout: float) -> Ended | None:
        """How the newest child ended; None if not within `timeout` seconds (0 polls)."""
        deadline = time.monotonic() + timeout
        with self._lock:
            try:
                while self._end is None and self._pipe.poll(_left(deadline)):
                    self._pid, *code = json.loads(self._pipe.recv_bytes())
                    self._end = Ended(self._pid or 0, *code) if code else None
            except (EOFError, OSError):  # the server has closed its end, but may not have ended yet
                with suppress(subprocess.TimeoutExpired):
                    self._end = Ended(self._pid or self._process.pid, self._process.wait(_left(deadline)))
            return self._end

    def kill(self) -> None:
        """Kill the process that `pid` names, without waiting."""
        with self._lock:
            if self.ended(0.0) is None:
                self._process.send_signal(signal.SIGCONT)  # a stopped server could not report the end
                with suppress(ProcessLookupError):
                    os.kill(self._pid or self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the server and its child. Idempotent."""
        with self._lock:
            self._pipe.close()
            self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                with suppress(subprocess.TimeoutExpired):  # it is stuck in the kernel
                    self._process.wait(_EXIT_SECONDS)

    def _launch(self) -> None:
        self._pipe, theirs = Pipe()
        variables = {name: value for name, value in environment_with_huge_pages().items() if name not in _BINDINGS}
        with theirs:
            self._process = subprocess.Popen(
                self._command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=variables
            )
        own = weakref.WeakMethod(self._pipe.close)  # a fork of this process must not hold the socket open
        os.register_at_fork(after_in_child=lambda: (close := own()) is not None and close())
        self._send(self._settings)

    def _send(self, values: Mapping[str, Any]) -> None:
        with suppress(OSError):  # the server has just ended: see `ended`
            self._pipe.send_bytes(json.dumps(values).encode())


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def serve(
    prepare: Callable[[Orders], Any],
    work: Callable[[Orders, Orders, Any], int],
    leave: Callable[[Orders], object] = lambda _settings: None,
) -> int:
    """Run `work` for each message of orders, and return this process's exit code.

    `prepare(settings)` loads. `work(settings, orders, prepared)` returns an exit code; it runs in a fork, or once in
    this process if `prepare` returned None. `leave(settings)` is called when the parent is gone.
    """
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them here, too; the parent ends this process
        signal.signal(number, signal.SIG_IGN)
    pipe = Connection(_STANDARD_INPUT)
    settings: Orders = {}
    children: list[int] = []
    """Process id of the present child, if any."""

    def end() -> NoReturn:
        for pid in children:  # a stopped child does not end by itself
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGKILL)
        leave(settings)
        os._exit(0)

    _on_hang_up(end)  # its thread holds no lock, so the process can be forked
    received = _received(pipe)
    settings |= next(received, {})
    prepared = prepare(settings)
    if prepared is not None:
        gc.collect()
        gc.freeze()  # otherwise a child's collection would write to all shared pages, which copies them
    for orders in received:
        if prepared is None:
            _report(pipe, os.getpid())
            return work(settings, orders, None)
        children.append(_fork(pipe, partial(work, settings, orders, prepared)))
        code = os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1])
        _report(pipe, children.pop(), code)
    return 0


def _received(pipe: Connection) -> Iterator[Orders]:
    with suppress(EOFError, OSError):
        while True:
            yield json.loads(pipe.recv_bytes())


def _fork(pipe: Connection, work: Callable[[], int]) -> int:
    """Process id of a fork that runs `work`."""
    pid = os.fork()
    if pid > 0:
        return pid
    code = 1
    try:
        _on_hang_up(lambda: os._exit(0))  # the parent is gone
        _report(pipe, os.getpid())  # before another process can reach this one
        code = work()
    except BaseException:  # noqa: BLE001 - the process ends with this traceback and an exit code
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _report(pipe: Connection, *numbers: int) -> None:
    with suppress(OSError):  # the parent is gone
        pipe.send_bytes(json.dumps(numbers).encode())


def _on_hang_up(react: Callable[[], object]) -> None:
    """Call `react` in another thread when the parent is gone."""
    waiting = select.poll()
    waiting.register(_STANDARD_INPUT, 0)  # poll always reports a hang-up
    threading.Thread(target=lambda: waiting.poll() and react(), name="parent", daemon=True).start()
