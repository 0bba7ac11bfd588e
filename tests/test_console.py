"""The console: the stream of each line, and output that nobody reads."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from amusd.console import Console
from amusd.logs import LineHandler

ROOT = Path(__file__).parents[1]
SMALL = "accept=0.8 verify_ms=25 draft_ms=2.5 simulate.num_tokens=40"
SMALL += " simulate.synchronous_lengths=[2] simulate.min_candidates=[0]"


PIECES = ("one\ntw", "o\nthr", "ee \x1b[2J")


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="a terminal of POSIX")
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_terminal_has_a_line_below_an_answer_to_its_end(
    monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = os.openpty()
    out = os.fdopen(theirs, "w", encoding="utf-8")
    with suppress(KeyboardInterrupt), Console(out=out).streaming(lambda: "12.5 tokens/s" + 99 * " more") as write:
        for piece in PIECES:
            write(piece)
        if is_interrupted:
            raise KeyboardInterrupt
    out.write("\0")
    out.close()
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        seen = b"".join(iter(lambda: terminal.read(1), b"\0")).decode()
    assert re.search(r"one\r\n.*12\.5 tokens/s.*two\r\n.*12\.5 tokens/s", seen, re.DOTALL)
    assert seen.rpartition("\x1b[2K")[2] == "three \ufffd[2J"  # all else below the whole lines is erased
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")  # the cursor


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="a terminal of POSIX")
@pytest.mark.parametrize("variable", ["COLUMNS", "LINES"])
@pytest.mark.parametrize("size", ["0", "1"])
def test_a_terminal_without_room_gets_the_text_alone(monkeypatch: pytest.MonkeyPatch, variable: str, size: str) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(variable, size)
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as out, Console(out=out).streaming(lambda: "status") as write:
        write("text\n")
    assert os.read(ours, 100) == b"text\r\n"
    os.close(ours)


def test_lines_go_above_the_progress_line_which_a_file_has_for_each_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    handler, terminal, file = LineHandler(), io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    handler.show_progress("work", 1, 4)
    handler.handle(logging.LogRecord("amusd", logging.INFO, "", 0, "two\nlines", None, None))
    handler.end_progress()
    bar = "[#####...............] 1/4  work"
    wiped = f"\r{' ' * len(bar)}\r"
    assert terminal.getvalue() == f"{bar}{wiped}amusd: two\\nlines\n{bar}{wiped}"
    monkeypatch.setattr(sys, "stderr", file)
    for done in range(1, 41):
        handler.show_progress("work", done, 40)
    assert file.getvalue().splitlines() == [f"{done}/40  work" for done in range(4, 41, 4)]


def test_a_locale_without_a_character_gets_another_one() -> None:
    program = "from amusd.console import Console; Console().text('it\\u2019s')"
    own = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=own, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "it?s\n"), done.stderr


def shell(words: str, folder: Path = ROOT, before: str = "") -> subprocess.CompletedProcess[str]:
    line = f"{before}exec {sys.executable} -m launch.main {words}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(["sh", "-c", line], cwd=folder, env=env, capture_output=True, text=True, timeout=240)


needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")


@needs_dev_full
@pytest.mark.parametrize("redirection", [">&-", ">/dev/full"])
def test_a_command_without_a_standard_output_says_so_in_one_line(redirection: str, tmp_path: Path) -> None:
    done = shell(f"simulate {SMALL} run_dir={tmp_path / 'run'} {redirection}")
    said = [line for line in done.stderr.splitlines() if not line[:1].isdigit() and "run directory" not in line]
    assert (done.returncode, len(said)) == (2, 1), done.stderr
    assert said[0].startswith("amusd: standard output: c")
    if redirection != ">&-":
        assert json.loads((tmp_path / "run" / "result.json").read_text())["complete"] is True


def test_a_configuration_is_not_printed_to_a_closed_standard_output() -> None:
    done = shell("generate --cfg job >&-")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("amusd: standard output: closed")


@needs_dev_full
def test_help_that_cannot_be_written_is_a_mistake_of_one_line() -> None:
    done = shell("generate --help >/dev/full")
    message = "amusd: standard output: cannot be written (No space left on device)\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_a_command_whose_output_is_cut_off_says_nothing_and_succeeds() -> None:
    unread, out = os.pipe()
    os.close(unread)
    command = [sys.executable, "-m", "launch.main", "generate", "--help"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, cwd=ROOT, env=buffered, stdout=out, stderr=subprocess.PIPE, text=True, timeout=240)
    os.close(out)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("argument", "code"), [("", 0), ("nope=1", 2)])
def test_a_command_without_a_standard_error_does_the_same_in_silence(argument: str, code: int, tmp_path: Path) -> None:
    done = shell(f"simulate {SMALL} {argument} run_dir={tmp_path / 'run'} 2>&-")
    assert (done.returncode, "Traceback" in done.stdout) == (code, False), done.stdout
    assert bool(done.stdout) == (code == 0)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("ulimit -n 31", "ulimit -n 31: a process needs 32 open files at least"),
        ("mkdir gone && cd gone && rmdir ../gone", "the working directory is gone: go to one that exists"),
    ],
)
def test_a_process_that_no_command_could_work_in_is_one_line(before: str, message: str, tmp_path: Path) -> None:
    done = shell(f"simulate {SMALL}", tmp_path, f"{before}; ")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"amusd: {message}\n")
    assert list(tmp_path.iterdir()) == []
