"""How a process that a signal asks to end does so: with its exit code, and without a page of text."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import amusd_launch
import pytest
from amusd_launch import signals

LOADS = """
import sys
sys.path[:0] = {path!r}
from amusd_launch.signals import exit_code_of, raise_on_signals
raise_on_signals()
def work():
    import torch
    return 0
sys.exit(exit_code_of(work))
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM])
def test_a_signal_amid_the_import_of_torch_ends_the_process_without_a_word(
    signum: signal.Signals, tmp_path: Path
) -> None:
    # as C++ does, it ends the process where an exception comes out of its initialisation
    (tmp_path / "torch.py").write_text(
        f"import os, time\ntry:\n    os.kill(os.getpid(), {int(signum)})\n    time.sleep(60)\n"
        "except BaseException:\n    os.write(2, b'terminate called')\n    os._exit(134)\n"
    )
    path = [str(tmp_path), str(Path(amusd_launch.__file__).parents[1]), *sys.path]
    code = LOADS.format(path=path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signum, "", "")


def test_a_signal_while_the_end_is_told_is_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise signals.Interrupted(signal.SIGTERM)

    monkeypatch.setattr(signals, "ignore_signals", interrupted)
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    assert signals.exit_code_of(lambda: 0) == 128 + signal.SIGTERM
