"""Processes that begin with torch and transformers imported: forks of one server, since an import takes seconds.

`Popen` is `subprocess.Popen` for commands of Python. The process that it starts is a fork of the server of
`multiprocessing`, and what that starts in turn is a fork of it. All else is real: process ids, parents, sessions,
signals, descriptors, exit codes. A forked process has the server's modules, as they are after their import, and the
server's seed of `hash`.

A new interpreter is started as ever for other commands, by a process with threads that do more than wait (the locks
that they hold would stay held in a fork), on other systems than Linux, and everywhere with pytest's
`--new-interpreters`, as in `make test-all`.
"""

from __future__ import annotations

import atexit
import functools
import gc
import inspect
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = (
    "tests.warm", "torch.distributed.run", "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3", "transformers.tokenization_utils_tokenizers", "amusd.commands.compare",
    "amusd.serving.server", "amusd.runtime.startup", "launch.run", "launch.jobs", "launch.compose",
)  # fmt: skip
_OF_SERVER = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_PATH = list(sys.path)  # the server's own
_WAITING = ("signals", "RendezvousKeepAliveTimer", "pt_tcpstore_uv")
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_STREAMS = ("p2cread", "c2pwrite", "errwrite")
_start_interpreter: Callable[..., None] = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_PARAMETERS = inspect.signature(_start_interpreter)


class Popen(subprocess.Popen[Any]):
    is_forked = sys.platform.startswith("linux")
    _process: Any = None

    def _execute_child(self, *given: Any) -> None:
        asked = _PARAMETERS.bind(self, *given).arguments
        if not (self.is_forked and _is_forkable(asked)):
            _start_interpreter(self, *given)
            return
        streams = [Connection(os.dup(stream)) for stream in _streams(asked)]  # which may be sent to a process
        self._process = _server().Process(target=_become, args=(_orders(asked), streams), daemon=True)
        self._process.start()
        self.pid = self._process.pid
        self._child_created = True
        self._close_pipe_fds(*(asked[name] for name in _PIPES))  # type: ignore[attr-defined]

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self._process is None:
            return super()._internal_poll(*given, **named)  # type: ignore[misc, no-any-return]
        self.returncode = self._process.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._process is None:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        self._process.join(timeout)
        self.returncode = self._process.exitcode
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode


@functools.cache
def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    inherited = forkserver._forkserver  # type: ignore[attr-defined]  # by a process of `tests.mutation`, from its own
    inherited._forkserver_address = inherited._forkserver_pid = inherited._forkserver_alive_fd = None
    with patch.dict(os.environ, _OF_SERVER), patch.object(tempfile, "tempdir", None):  # a test's own goes with it
        forkserver.ensure_running()
    return context


def _orders(asked: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "words": _program(asked["args"]),
        "cwd": os.fspath(asked["cwd"] or Path.cwd()),
        "environ": dict(os.environ if asked["env"] is None else asked["env"]),
        "start_new_session": bool(asked["start_new_session"]),
    }


def _streams(asked: Mapping[str, Any]) -> list[int]:
    return [asked[name] if asked[name] != -1 else own for own, name in enumerate(_STREAMS)]


def _is_forkable(asked: Mapping[str, Any]) -> bool:
    """True if this runs a script or a module with this interpreter and needs nothing that only exec can do."""
    args = asked["args"]
    if isinstance(args, str | bytes | os.PathLike) or list(args)[:1] != [sys.executable] or asked["shell"]:
        return False
    first = next(iter(_program(args)), "-")
    is_program = first in ("-m", "-c") or not first.startswith("-")
    return is_program and asked["executable"] is None and asked["umask"] < 0


def _program(args: Sequence[str]) -> list[str]:
    words = [os.fspath(word) for word in args][1:]
    return words[1:] if words[:1] == ["-u"] else words


def _fork_child(self: Any, *given: Any) -> None:
    asked = _PARAMETERS.bind(self, *given).arguments
    if not _others_wait() or not _is_forkable(asked):
        _start_interpreter(self, *given)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    self.pid = os.fork()
    if self.pid == 0:
        _become(_orders(asked), _streams(asked), asked["pass_fds"], asked["preexec_fn"])
    self._child_created = True
    self._close_pipe_fds(*(asked[name] for name in _PIPES))


def _others_wait() -> bool:
    """True if every other thread of this process is known to wait for a message, a timer or a process."""
    own = {thread.native_id for thread in threading.enumerate() if thread.name.startswith(_WAITING)}
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) not in (*own, os.getpid())]
    return threading.current_thread() is threading.main_thread() and all(
        (task / "comm").read_text().strip() in _WAITING for task in tasks
    )


def _become(
    orders: dict[str, Any],
    streams: Sequence[int | Connection],
    keep: Sequence[int] = (),
    preexec: Callable[[], object] | None = None,
) -> NoReturn:
    """Be the process that runs this program, from just after the fork to the exit code."""
    code = 1
    try:
        gc.freeze()  # what the parent has is never collected here: descriptors of the same number are others
        _take_descriptors([stream if isinstance(stream, int) else stream.fileno() for stream in streams], keep)
        _forget_parent()
        os.environ.clear()
        os.environ.update(orders["environ"])
        os.chdir(orders["cwd"])
        if orders["start_new_session"]:
            os.setsid()
        if preexec is not None:
            preexec()
        code = _code_of(orders["words"])
    except BaseException:  # noqa: BLE001 - the end of the process: told in full, and the exit code says so
        traceback.print_exc()
    os._exit(code)


def _take_descriptors(streams: Sequence[int], keep: Sequence[int]) -> None:
    """Have these as standard streams, `keep` as they are, and nothing else of the parent's.

    The parent's other numbers stay taken: what it has in memory may still close them.
    """
    for number, stream in enumerate([os.dup(stream) for stream in streams]):  # above them all
        os.dup2(stream, number)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if descriptor not in (0, 1, 2, nothing, *keep):
            os.dup2(nothing, descriptor, inheritable=False)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the rest of the process
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        errors, is_line_wise = ("strict", os.isatty(1)) if number == 1 else ("backslashreplace", True)
        text = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=is_line_wise)
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def _forget_parent() -> None:
    """Reset what exec would reset: signals, exit handlers, and values that the parent has set in modules."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    tempfile.tempdir = None
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    sys.path[:] = _PATH
    subprocess.Popen._execute_child = _fork_child  # type: ignore[attr-defined]
    warnings.resetwarnings()
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", ResourceWarning)


def _new_main() -> ModuleType:
    """The program's module, also by the name that multiprocessing pickles its classes by."""
    sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
    return sys.modules["__main__"]


def _code_of(words: list[str]) -> int:
    code = 0
    try:
        if words[0] == "-m":
            sys.path[0], sys.argv = str(Path.cwd()), words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.path[0], sys.argv = "", ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), vars(_new_main()))
        else:
            sys.path[0], sys.argv = str(Path(words[0]).resolve().parent), words
            program = _new_main()
            program.__file__ = words[0]
            exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), vars(program))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code
