"""Ends a process at most `GRACE_SECONDS` after a signal, in order if possible; gives the exit code."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from amusd.errors import ConfigError, PeerError, PeerProtocolError
from amusd.logs import logger, show_lines

GRACE_SECONDS = 1.5
_WATCH = "signals"
_PR_SET_PDEATHSIG = 1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def raise_on_signals() -> None:
    """Make SIGINT, SIGTERM and SIGHUP raise `KeyboardInterrupt` with the number, once, in the main thread.

    An ignored SIGHUP stays ignored. Another thread ends the process after `GRACE_SECONDS`.
    """
    is_hup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # by nohup
    signals = [number for number in _SIGNALS if number != signal.SIGHUP or not is_hup_ignored]
    if any(thread.name == _WATCH for thread in threading.enumerate()):
        return

    def on_signal(signum: int, _frame: FrameType | None) -> None:
        for number in _SIGNALS:  # not `SIG_IGN`: Python complains if a signal has just arrived
            signal.signal(number, lambda _number, _frame: None)
        threading.Thread(target=_end, args=(signum,), name="end", daemon=True).start()
        is_loading = getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False)
        if is_loading:  # there is nothing to save, and C++ would print a page about the exception
            os.write(sys.stderr.fileno(), b"amusd: interrupted\n")
            os._exit(128 + signum)
        raise KeyboardInterrupt(signum)

    def watch() -> None:
        while told := os.read(reading, 1):
            if told[0] in signals:
                _end(told[0])

    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in signals:
        signal.signal(number, on_signal)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=watch, name=_WATCH, daemon=True).start()


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent dies (Linux; elsewhere nothing)."""
    if sys.platform.startswith("linux"):
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # the parent died before
            os.kill(os.getpid(), signal.SIGTERM)


def _end(signum: int) -> None:
    time.sleep(GRACE_SECONDS)
    os._exit(128 + signum)


def exit_code_of(work: Callable[[], int]) -> int:
    """Exit code of some work: 2 for a user's mistake, 1 for a failure. Reports both."""
    try:
        return work()
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    except Exception as error:  # noqa: BLE001 - any error ends the work: it is reported, with an exit code
        if isinstance(error, PeerProtocolError) or not isinstance(error, PeerError) or "\n" in str(error):
            traceback.print_exc()  # a bug, perhaps the other side's
        else:
            logger.error("%s", error)
        return 1


def end_of_program(work: Callable[[], int]) -> int:
    """Exit code of a program's work: as `exit_code_of`, or 128 and the number of the signal that ended it."""
    if sys.stderr is None:  # closed (`2>&-`): the next file to be opened would take its descriptor
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends
        os.set_inheritable(sys.stderr.fileno(), True)
    show_lines()
    try:
        return exit_code_of(work)
    except KeyboardInterrupt as interruption:
        told = next(iter(interruption.args), None)
        return 128 + (told if isinstance(told, int) else signal.SIGINT)
