"""A process ends on a signal with the right exit code, in time, and without a page of text."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import amusd_launch
import pytest
from amusd_launch.signals import end_of_program

from amusd.errors import ConfigError, PeerLostError, PeerProtocolError

BEGINS = """
import sys
sys.path[:0] = {path!r}
from amusd_launch.signals import raise_on_signals
raise_on_signals()
"""


def end_of(program: str, *path: str) -> subprocess.CompletedProcess[str]:
    code = BEGINS.format(path=[*path, str(Path(amusd_launch.__file__).parents[1])]) + program
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)


def test_a_signal_amid_the_import_of_torch_ends_the_process_in_a_line(tmp_path: Path) -> None:
    # as C++ does, it ends the process where an exception comes out of its initialisation
    (tmp_path / "torch.py").write_text(
        f"import os, time\ntry:\n    os.kill(os.getpid(), {int(signal.SIGTERM)})\n    time.sleep(60)\n"
        "except BaseException:\n    os.write(2, b'terminate called')\n    os._exit(134)\n"
    )
    done = end_of("import torch", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "", "amusd: interrupted\n")


@pytest.mark.parametrize(
    ("error", "code", "is_shown"),
    [
        (ConfigError("wrong"), 2, False),
        (PeerLostError("gone"), 1, False),
        (PeerProtocolError("nonsense"), 1, True),
        (ValueError("a bug"), 1, True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_may_be_a_bug_shows_where_and_all_else_is_a_line(
    error: Exception, code: int, is_shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end_of_program(Mock(side_effect=error)) == code
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback") if is_shown else printed == f"amusd: {error}\n"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere the kernel tells nobody")
def test_a_process_gets_a_signal_when_its_parent_dies() -> None:
    program = """
import os, time
from launch.signals import end_with_parent
reading, writing = os.pipe()
if os.fork():
    os.read(reading, 1)
    os._exit(0)
end_with_parent()
os.write(writing, b"1")
time.sleep(20)
"""
    # which waits until no process can write to its pipes
    done = end_of(program, str(Path(__file__).parents[2]))
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (0, [f"KeyboardInterrupt: {int(signal.SIGTERM)}"])


@pytest.mark.parametrize("sleeps", ["time.sleep(60)", "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"])
def test_a_process_that_does_not_come_back_is_ended(sleeps: str) -> None:
    """Python's handler does not run within a C function, and code that catches `KeyboardInterrupt` goes on."""
    program = f"""
import hashlib, os, threading, time
timer = threading.Timer(0.5, os.kill, (os.getpid(), {int(signal.SIGINT)}))
while True:
    try:
        timer.is_alive() or timer.ident or timer.start()
        {sleeps}
    except KeyboardInterrupt as interruption:
        print(*interruption.args, flush=True)
"""
    done = end_of(program)
    assert (done.returncode, done.stderr) == (130, "")
    assert done.stdout == ("2\n" if sleeps.startswith("time") else "")
