"""The end of a worker whose parent dies, or that is asked to end: soon, in order, and certainly.

The first signal raises `Interrupted` in the main thread, so that results are saved, and arms a timer that kills the
process should that take too long. Later signals change nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from amusd.console import tell
from amusd.errors import ConfigError, PeerFailedError, PeerLostError

from .process_tree import state_of

GRACE_SECONDS = 1.0
"""Time from a signal to the certain end."""
GRACE_SECONDS_AFTER_PEER = 10.0
"""The same when the other worker failed: nobody is waiting at a keyboard."""
PEER_FAILED = signal.SIGUSR1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, PEER_FAILED)
_PR_SET_PDEATHSIG = 1
_WATCH_SECONDS = 0.25
_JOIN_SECONDS = 1.0
"""How long what is watched may hold up the end of a watch."""


class Interrupted(KeyboardInterrupt):
    """A signal asks this process to end. Carries its number."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"signal {signum}")
        self.signum = signum


def end_with_parent(signum: int = signal.SIGTERM) -> None:
    """Have the kernel send `signum` to this process when its parent dies (Linux; elsewhere nothing)."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signum)


def raise_on_signals() -> None:
    """Have SIGINT, SIGTERM, SIGHUP and `PEER_FAILED` raise `Interrupted`, once, and start the countdown."""

    def on_signal(signum: int, _frame: FrameType | None) -> None:
        if signum != PEER_FAILED and _is_loading("torch"):
            os._exit(128 + signum)  # nothing is to be saved yet, and C++ answers an exception with a page of text
        ignore_signals()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS_AFTER_PEER if signum == PEER_FAILED else GRACE_SECONDS)
        raise Interrupted(signum)

    for number in _SIGNALS:
        signal.signal(number, on_signal)


def _is_loading(module: str) -> bool:
    """The import of the module has begun and is not over."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def ignore_signals() -> None:
    """This process is about to end by itself: a signal has nothing left to save, and would only look like an error.

    The handler does nothing: of one that is `SIG_IGN` Python complains where a signal has just arrived.
    """
    for number in _SIGNALS:
        signal.signal(number, lambda _number, _frame: None)


def exit_code_of(work: Callable[[], int]) -> int:
    """Do the work of a process, tell why it failed, and return its exit code. From then on signals are ignored."""
    try:
        code = _told_code_of(work)
        ignore_signals()
    except Interrupted as interruption:  # amid the work, or while its end is told
        code = 128 + interruption.signum
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS_AFTER_PEER)  # all is saved; what is left is Python's own end
    return code


def _told_code_of(work: Callable[[], int]) -> int:
    try:
        return work()
    except ConfigError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the ranks of a machine read the same arguments: one line
            tell(str(error))
        return 2
    except Exception as error:  # noqa: BLE001 - the end of the process: told in full, and the exit code says so
        if isinstance(error, PeerLostError | PeerFailedError) and "\n" not in str(error):
            tell(str(error))  # no bug of this process
        else:
            traceback.print_exc()
        return 1


def interrupt_main_thread() -> None:
    """Raise `Interrupted` in the main thread, system calls included. For another thread of this process.

    A main thread that is stuck where no signal is handled ends with the process, after `GRACE_SECONDS_AFTER_PEER`.
    """
    identity = threading.main_thread().ident
    if identity is not None:
        if not any(signal.getitimer(signal.ITIMER_REAL)):
            signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS_AFTER_PEER)
        signal.pthread_kill(identity, PEER_FAILED)


@contextmanager
def watching(is_there: Callable[[], bool], react: Callable[[], None], name: str) -> Iterator[None]:
    """Call `react`, once and in another thread, if `is_there` says so while this context is open.

    The thread has ended when it is left, unless `is_there` does not return.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_WATCH_SECONDS):
            if is_there():
                if not over.is_set():
                    react()
                return

    thread = threading.Thread(target=watch, name=f"watch-{name}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_JOIN_SECONDS)


def end_if_stopped(pid: int) -> bool:
    """Kill a process that a signal has stopped, and that so cannot end by itself; whether it was (Linux only)."""
    try:
        is_stopped = state_of(pid) == "T"
        if is_stopped:
            os.kill(pid, signal.SIGKILL)
    except OSError:  # there is none, or it is another user's by now
        return False
    return is_stopped


def continue_if_stopped(pid: int) -> None:
    """Continue a process that a signal has stopped (Linux only)."""
    with suppress(OSError):  # there is none, or it is another user's by now
        if state_of(pid) == "T":
            os.kill(pid, signal.SIGCONT)
