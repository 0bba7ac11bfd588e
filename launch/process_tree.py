"""Runs the workers as a process tree of their own, and ends all of it, within a deadline, when this process is to end.

The root, the target's process, is asked to end, and ends the others. What is left is found by its parents, and killed.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

STOP_SECONDS = 1.3
"""From the first signal until what still lives is killed: more than a worker's own GRACE_SECONDS."""
END_SECONDS = 10.0
"""How long a tree may take to end whose work is done."""
_KILL_SECONDS = 0.5
_LOOK_SECONDS = 1.0
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of the tree."""

    exit_code: int
    """The exit code of its root."""
    signum: int | None = None
    """The signal that asked this process to end it, and did not let it finish what it was at."""
    stuck: tuple[int, ...] = ()
    """Processes that were killed, since they had not ended `END_SECONDS` after their work was done."""


def run_tree(
    command: Sequence[str],
    environment: Mapping[str, str],
    is_done: Callable[[], bool],
    *,
    quiet: bool = False,
    drain_seconds: float = 0.0,
) -> Ended:
    """Run a command until it ends by itself, or until a signal arrives here; then end all that it started.

    `is_done` says whether its work is done, after which it has `END_SECONDS`. `quiet`: what it writes to standard
    output is dropped. `drain_seconds`: the first signal asks the root to end, and gives it this long to end what it is
    at; a second one is answered as ever. To be called in the main thread. SIGINT, SIGTERM and SIGHUP are answered here
    while it runs; SIGHUP unless it is ignored (`nohup`).
    """
    _adopt_orphans()
    deadline, asked = math.inf, None
    others = descendants(os.getpid())
    with _signal_pipe() as (pipe, settle):
        root = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else None,
            start_new_session=True,
            preexec_fn=_die_with_launcher(),  # noqa: PLW1509 - no thread runs here, and one C call is made
        )
        while root.poll() is None:
            signum = _next_signal(pipe)
            if signum in _STOP_SIGNALS and drain_seconds:
                root.terminate()
                deadline, drain_seconds, asked = time.monotonic() + drain_seconds, 0.0, signum
            elif signum in _STOP_SIGNALS:
                settle()
                exit_code = _stop_tree(root)
                _end_left_over(others)
                return Ended(exit_code=exit_code, signum=signum)
            elif deadline == math.inf and is_done():
                deadline = time.monotonic() + END_SECONDS
            elif time.monotonic() >= deadline:
                stuck = tuple(filter(_is_left, (root.pid, *descendants(root.pid))))
                exit_code = _stop_tree(root)
                _end_left_over(others)
                return Ended(exit_code=exit_code, stuck=stuck)
        _end_left_over(others)
        was_cut_off = root.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
        return Ended(exit_code=root.returncode, signum=asked if was_cut_off else None)


def _stop_tree(root: subprocess.Popen[bytes]) -> int:
    """Ask a process to end, and kill what is left of its tree after `STOP_SECONDS`. Return its exit code."""
    if not sys.platform.startswith("linux"):
        root.terminate()
        with suppress(subprocess.TimeoutExpired):
            return root.wait(STOP_SECONDS)
        root.kill()
        return _exit_code(root)
    pids = [root.pid, *descendants(root.pid)]
    handles = _handles(pids)
    try:
        root.terminate()
        left = _wait_for(handles, STOP_SECONDS)
        _signal_all(left, signal.SIGKILL)
        _wait_for(left, _KILL_SECONDS)
    finally:
        _release(handles, pids)
    return _exit_code(root)


def _exit_code(killed: subprocess.Popen[bytes]) -> int:
    with suppress(subprocess.TimeoutExpired):  # it is stuck in the kernel
        return killed.wait(_KILL_SECONDS)
    return -signal.SIGKILL


def descendants(pid: int) -> list[int]:
    """Every process that `pid` started, directly or not, parents first (Linux; elsewhere none is known)."""
    if not sys.platform.startswith("linux"):
        return []
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # it has just ended
                child = int(folder.name)
                children.setdefault(int(_status(child)[1]), []).append(child)
    found = list(children.get(pid, []))
    for child in found:  # grows while it is walked
        found += children.get(child, [])
    return found


def state_of(pid: int) -> str:
    """`T` for a stopped process, `Z` for one that has ended (Linux). Raises OSError when there is none."""
    return _status(pid)[0]


def _is_left(pid: int) -> bool:
    try:
        return state_of(pid) != "Z"
    except OSError:
        return False


def _status(pid: int) -> list[str]:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return stat.rpartition(")")[2].split()  # the name before it may hold anything


def _end_left_over(others: Sequence[int]) -> None:
    """Wait for what the ended root has left, which its parent's end has told to end; kill it after `STOP_SECONDS`.

    `others` are children of this process that have nothing to do with it.
    """
    pids = [pid for pid in descendants(os.getpid()) if pid not in others]
    handles = _handles(pids)
    try:
        left = _wait_for(handles, STOP_SECONDS)
        _signal_all(left, signal.SIGKILL)
        _wait_for(left, _KILL_SECONDS)
    finally:
        _release(handles, pids)


def _release(handles: Sequence[int], pids: Sequence[int]) -> None:
    for handle in handles:
        os.close(handle)
    for pid in pids:  # orphans by now, and ours: an ended one is not to stay in the process table
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _die_with_launcher() -> Callable[[], object] | None:
    """What the child does before it becomes the target: ask the kernel to kill it with us (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _adopt_orphans() -> None:
    """Become the parent of those whose parent ends first (Linux), for the rest of this process."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextmanager
def _signal_pipe() -> Iterator[tuple[int, Callable[[], None]]]:
    """Signals arrive as bytes of a pipe, so that none is lost or answered halfway through a step.

    Yields its reading end, and a function after which further signals are ignored.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    ignored = [number for number in (signal.SIGHUP,) if signal.getsignal(number) is signal.SIG_IGN]
    watched = [number for number in (*_STOP_SIGNALS, signal.SIGCHLD) if number not in ignored]
    before = {number: signal.signal(number, lambda _number, _frame: None) for number in watched}
    previous = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def settle() -> None:
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    try:
        yield reading, settle
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


def _next_signal(pipe: int) -> int | None:
    """The next signal, or None after a while without one."""
    ready, _, _ = select.select([pipe], [], [], _LOOK_SECONDS)
    return os.read(pipe, 1)[0] if ready else None


def _handles(pids: Sequence[int]) -> list[int]:
    """File descriptors that stand for processes; they never come to mean another one, as numbers do."""
    handles = []
    for pid in pids:
        with suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    return handles


def _signal_all(handles: Sequence[int], signum: int) -> None:
    for handle in handles:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signum)


def _wait_for(handles: Sequence[int], timeout: float) -> list[int]:
    """Wait until the processes have ended; return those that have not after `timeout` seconds."""
    left, deadline = list(handles), time.monotonic() + timeout
    while left:
        ended, _, _ = select.select(left, [], [], max(0.0, deadline - time.monotonic()))
        if not ended:
            break
        left = [handle for handle in left if handle not in ended]
    return left
