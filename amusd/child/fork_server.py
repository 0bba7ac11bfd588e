"""The child's end: loads once what every life needs, and forks a life for each line of orders.

A forked life begins with everything that was loaded, in the same memory, which the system copies page by page where one
of them writes. It takes as long as a fork: some hundredths of a second instead of the seconds that imports take. Only a
process with a single thread and no GPU can be forked like that, so whoever calls `serve` decides: where nothing is
prepared, the process itself is the life, and the next one is another process.

`command_of` runs this file: `fork_server.py MODULE`. The folder that the package lies in is all that is added to where
modules are looked for, and only if it is missing there; the current directory is not looked in.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
Orders = dict[str, Any]

GRACE_SECONDS = 2.0
"""How long a life may take to end by itself once the parent has hung up."""
_STANDARD_INPUT = 0


class Channel:
    """The two-way line of text to the parent of this process."""

    def orders(self) -> Iterator[Orders]:
        """The settings, then the orders of one life after another, until the parent hangs up."""
        with os.fdopen(os.dup(_STANDARD_INPUT), encoding="utf-8") as lines, suppress(ConnectionError):
            for line in lines:
                yield json.loads(line)

    def say(self, text: str) -> None:
        """Tell the parent, which finds it in `Ended.said`."""
        self.report(said=text)

    def report(self, **fields: object) -> None:
        """One line to the parent; nothing where that is gone."""
        with suppress(OSError):
            os.write(_STANDARD_INPUT, json.dumps(fields).encode() + b"\n")

    def await_hang_up(self, *others: int) -> bool:
        """Wait until the parent is gone, or until one of `others` (descriptors) can be read; whether it is gone."""
        waiting = select.poll()
        waiting.register(_STANDARD_INPUT, 0)  # a hang-up is told unasked
        for descriptor in others:
            waiting.register(descriptor, select.POLLIN)
        return any(descriptor == _STANDARD_INPUT for descriptor, _ in waiting.poll())

    def on_hang_up(self, react: Callable[[], object]) -> None:
        """Call `react` in another thread when the parent is gone. A forked life outlives its server."""

        def watch() -> None:
            self.await_hang_up()
            react()

        threading.Thread(target=watch, name="parent", daemon=True).start()


def ignore_terminal() -> None:
    """Ctrl-C and a lost terminal are for the parent, which ends this process."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


Life = Callable[[Channel, Orders, Orders, T | None], int]
"""Does the work of one life: gets settings, orders and what was prepared; returns an exit code."""


def serve(prepare: Callable[[Orders], T | None], live: Life[T]) -> int:
    """Run `live` for each line of orders, and return the exit code of this process.

    `prepare` gets the first line, the settings; what it returns is what every life is given, each in a process forked
    from this one. If that is None, this process runs the first life itself, and returns what it returns.
    """
    channel = Channel()
    lines = channel.orders()
    settings = next(lines, None)
    if settings is None:
        return 0
    prepared = prepare(settings)
    if prepared is not None:
        gc.collect()
        gc.freeze()  # or a collection in a life would write to, and so copy, all that it shares
    for orders in lines:
        if prepared is None:
            channel.report(pid=os.getpid())
            return live(channel, settings, orders, None)
        _refuse_after_cuda()
        pid = os.fork()
        if pid == 0:
            _run(channel, partial(live, channel, settings, orders, prepared))
        channel.report(pid=pid, ended=_await_end(channel, pid))
    return 0


def _refuse_after_cuda() -> None:
    """Raise `RuntimeError` where CUDA is initialised in this process: no GPU works in a fork of it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError("what was prepared has initialised CUDA, and a process that has must not be forked")


def _run(channel: Channel, live: Callable[[], int]) -> None:
    """The whole of a forked life. What its parent meant to do at its own end is not done here."""
    code = 1
    try:
        channel.report(pid=os.getpid())  # first, so that nobody has met a life that cannot be named
        code = live()
    except BaseException:  # noqa: BLE001 - the end of the process: told in full, and the exit code says so
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        channel.report(pid=os.getpid(), ended=code)  # the server may be stopped, or gone
        os._exit(code)


def _await_end(channel: Channel, pid: int) -> int:
    """The exit code of a forked life, or minus the signal that ended it. It does not outlive the parent by much."""
    life = os.pidfd_open(pid)
    try:
        if channel.await_hang_up(life) and not select.select([life], [], [], GRACE_SECONDS)[0]:
            signal.pidfd_send_signal(life, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(life)


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has no such flag
        del sys.path[0]  # this file's own folder

    import importlib
    from pathlib import Path

    _folder = str(Path(__file__).parents[2])
    if _folder not in sys.path:
        sys.path.insert(0, _folder)
    importlib.import_module(sys.argv[1]).main()
