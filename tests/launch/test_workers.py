"""Process trees, of `amusd` and of torchrun, with workers that need no model: exit codes, files, signals, orphans."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.process_tree import descendants
from tests.launch.processes import FAKE, SECONDS, amusd_command, environment, run, torchrun_command
from tests.warm import Popen

STOP_SECONDS = 6.0
"""The promise is 2 seconds; a busy machine gets three times that here."""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="process trees are read from /proc")


def test_a_run_streams_to_stdout_fills_its_folder_and_says_nothing_else(tmp_path: Path) -> None:
    prompt = "what's {this}, ${that}?"
    done = run(amusd_command("generate", FAKE, f"prompt={prompt}", "run_dir=out", "mode=autoregressive"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"generate {prompt}\n"
    assert done.stderr == f"amusd: run directory: {tmp_path / 'out'}\n"
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.yaml", "environment.json", "events", "result.json", "workers.json"}
    workers = json.loads((tmp_path / "out" / "workers.json").read_text())
    seen_before_the_first_token = json.loads((tmp_path / "out" / "result.json").read_text())["workers"]
    assert workers == seen_before_the_first_token
    assert len({*workers["target"], *workers["draft"]}) == 2


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ("target refuses", "target.model=/nowhere: no such folder"),
        ("target refuses late", "target.model=/damaged: cut short"),
        ("draft refuses", "drafter.model=/nowhere: no such folder"),
    ],
)
def test_a_mistake_found_by_a_worker_is_one_line_and_exit_code_2(tmp_path: Path, prompt: str, line: str) -> None:
    done = run(amusd_command("generate", FAKE, f"prompt={prompt}", "run_dir=out"), tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"amusd: run directory: {tmp_path / 'out'}\namusd: {line}\n"
    assert not (tmp_path / "out").exists() or prompt != "target refuses"  # that one had not begun to measure


def test_a_bug_in_a_worker_shows_its_traceback_and_no_report_of_torchrun(tmp_path: Path) -> None:
    done = run(amusd_command("generate", FAKE, "prompt=draft crashes", "run_dir=out"), tmp_path)
    assert done.returncode == 1
    assert "ValueError: a bug in the draft" in done.stderr
    assert done.stderr.splitlines()[-1] == "amusd: the draft worker could not start: a bug in the draft"
    assert "ValueError: a bug in the draft" in (tmp_path / "out" / "draft_error.txt").read_text()
    assert "ChildFailedError" not in done.stderr


def test_a_killed_draft_does_not_end_the_target(tmp_path: Path) -> None:
    done = run(amusd_command("generate", FAKE, "prompt=draft is killed", "run_dir=out"), tmp_path)
    assert done.returncode == 0, done.stderr
    workers = json.loads((tmp_path / "out" / "workers.json").read_text())
    assert f"pid {workers['draft'][0]}) was killed by signal 9" in done.stderr


def test_a_killed_draft_is_followed_by_another_that_is_told_where_the_target_listens_now(tmp_path: Path) -> None:
    done = run(amusd_command("generate", FAKE, "prompt=draft comes back", "run_dir=out"), tmp_path)
    assert done.returncode == 0, done.stderr
    second = (tmp_path / "out" / "second").read_text()
    assert json.loads((tmp_path / "out" / "workers.json").read_text())["draft"] == [int(second)]
    assert done.stderr.count("was killed by signal 9") == 1


def interrupt_launcher(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)


def interrupt_foreground_group(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)


def terminate_launcher(process: subprocess.Popen[str]) -> None:
    process.terminate()


@pytest.mark.parametrize(
    ("stop", "prompt", "exit_code"),
    [
        (interrupt_foreground_group, "wait", 130),
        (terminate_launcher, "wait", 143),
        (interrupt_launcher, "ignore signals", 130),
    ],
)
def test_an_interruption_ends_every_process_within_two_seconds(
    tmp_path: Path, stop: Callable[[subprocess.Popen[str]], None], prompt: str, exit_code: int
) -> None:
    with started(tmp_path, prompt) as process:
        tree = descendants(process.pid)
        assert len(tree) >= 2  # target, draft
        began = time.monotonic()
        stop(process)
        assert process.wait(SECONDS) == exit_code
        took = time.monotonic() - began
        assert [pid for pid in tree if Path(f"/proc/{pid}").exists()] == []
        assert took < STOP_SECONDS
        assert (tmp_path / "out" / "config.yaml").exists()
        assert (tmp_path / "out" / "result.json").exists() == (prompt == "wait")
        assert process.stderr is not None
        where = tmp_path / "out"
        assert process.stderr.read().splitlines() == [
            f"amusd: run directory: {where}",
            f"amusd: interrupted; what was measured so far is in {where}",
        ]


@pytest.mark.parametrize(
    ("more", "signum", "code"),
    [
        (("target_tensor_parallel_size=2",), signal.SIGHUP, 129),
        ((), signal.SIGTERM, 143),
    ],
)
def test_a_target_that_is_ended_is_one_line(tmp_path: Path, more: tuple[str, ...], signum: int, code: int) -> None:
    line = "the workers were interrupted"
    with started(tmp_path, "wait", *more) as process:
        tree = descendants(process.pid)
        os.kill(tree[0], signum)
        assert process.wait(SECONDS) == code
        assert [pid for pid in tree if Path(f"/proc/{pid}").exists()] == []
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
    where = tmp_path / "out"
    assert lines == [f"amusd: run directory: {where}", f"amusd: {line}; what was measured so far is in {where}"]
    assert list(temporary(tmp_path).iterdir()) == []


def test_what_a_killed_launcher_leaves_holds_no_prompt_and_is_taken_away_by_the_next_run(tmp_path: Path) -> None:
    with started(tmp_path, "wait") as process:
        handles = [os.pidfd_open(pid) for pid in descendants(process.pid)]
        (folder,) = temporary(tmp_path).iterdir()
        assert (folder / "outcome").exists()
        assert [path for path in folder.rglob("*") if path.is_file() and b'"wait"' in path.read_bytes()] == []
        done = run(
            amusd_command("generate", FAKE, "prompt=beside it", "run_dir=beside"), tmp_path, TMPDIR=str(folder.parent)
        )
        assert (done.returncode, folder.exists()) == (0, True), done.stderr
        process.kill()
        for handle in handles:
            assert wait_for_end(handle, SECONDS), "a worker outlived the launcher"
            os.close(handle)
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
    assert len(lines) == 2, lines
    where = tmp_path / "out"
    assert lines[1] == f"amusd: the amusd command is gone, and its run with it; what was measured so far is in {where}"
    assert folder.exists()
    done = run(amusd_command("generate", FAKE, "prompt=next", "run_dir=next"), tmp_path, TMPDIR=str(folder.parent))
    assert done.returncode == 0, done.stderr
    assert list(temporary(tmp_path).iterdir()) == []


def test_torchrun_by_hand_does_the_same_job(tmp_path: Path) -> None:
    done = run(torchrun_command(FAKE, "compare", "prompt=by hand", "run_dir=out"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "compare by hand\n"
    assert f"amusd: run directory: {tmp_path / 'out'}\n" in done.stderr
    assert (tmp_path / "out" / "workers.json").exists()


class started:  # noqa: N801 - reads as a function where it is used
    """A run whose target has produced its first line; ended in the end."""

    def __init__(self, folder: Path, prompt: str, *more: str) -> None:
        self._process = Popen(
            amusd_command("generate", FAKE, f"prompt={prompt}", "run_dir=out", *more),
            cwd=folder,
            env=environment(TMPDIR=str(temporary(folder))),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.line = self._process.stdout.readline()

    def __enter__(self) -> subprocess.Popen[str]:
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=SECONDS)


def temporary(folder: Path) -> Path:
    """Where a run that was `started` in this folder keeps its temporary files."""
    path = folder / "t"
    path.mkdir(exist_ok=True)
    return path


def wait_for_end(handle: int, timeout: float) -> bool:
    return bool(select.select([handle], [], [], timeout)[0])
