"""Children that are forked from one process: told apart, ended, replaced; none outlives its parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from amusd import child
from amusd.child import Ended, ForkServer, command_of

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are forked on Linux alone"),
]

SECONDS = 60.0
SERVER = f"""
import os, signal, sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from amusd.child import serve

def prepare(settings):
    exec(settings["prepares"])
    return settings["forks"] or None

def work(settings, orders, prepared):
    exec(orders["does"])
    return orders["code"]

sys.exit(serve(prepare, work))
"""
WAITS = f"time.sleep({SECONDS})"


@contextmanager
def started(prepares: str = "", *, forks: bool = True) -> Iterator[ForkServer]:
    server = ForkServer([sys.executable, "-c", SERVER], {"prepares": prepares, "forks": forks})
    try:
        yield server
    finally:
        server.close()


def end_of(server: ForkServer, does: str = "", *, code: int = 0) -> Ended:
    server.start({"does": does, "code": code})
    end = server.ended(SECONDS)
    assert end is not None
    return end


def start(server: ForkServer) -> int:
    server.start({"does": WAITS, "code": 0})
    while server.is_preparing:
        assert server.ended(0.01) is None
    return server.pid


def parent_of(pid: int) -> int:
    return psutil.Process(pid).ppid()


def is_gone(handle: int) -> bool:
    try:
        return bool(select.select([handle], [], [], SECONDS)[0])
    finally:
        os.close(handle)


def test_openmp_does_not_bind_a_child_to_the_cores_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with started() as server:
        assert end_of(server, "assert 'GOMP_CPU_AFFINITY' not in os.environ; os.environ['OMP_NUM_THREADS']").code == 0


def test_the_command_finds_this_very_package_whatever_the_current_directory_holds(tmp_path: Path) -> None:
    for name in ("amusd", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the current directory')")
    done = subprocess.run(command_of("amusd.child"), cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert f"cannot import name 'main' from 'amusd.child' ({child.__file__})" in done.stderr


def test_each_child_is_a_process_of_its_own_forked_from_one(capfd: pytest.CaptureFixture[str]) -> None:
    before = psutil.Process().num_fds()
    with started() as server:
        ends = [end_of(server, code=7), end_of(server, "raise ValueError('as told')")]
        killed = start(server)
        server_pid = parent_of(killed)
        server.kill()
        ends += [server.ended(SECONDS) or pytest.fail("it was not killed"), end_of(server)]
        assert parent_of(start(server)) == server_pid
    assert [end.code for end in ends] == [7, 1, -signal.SIGKILL, 0]
    assert ends[2].pid == killed
    assert len({server_pid, *(end.pid for end in ends)}) == 5
    assert "ValueError: as told" in capfd.readouterr().err
    assert psutil.Process().num_fds() <= before


def test_where_nothing_is_prepared_each_child_is_the_process_itself() -> None:
    with started(forks=False) as server:
        pid = start(server)
        assert parent_of(pid) == os.getpid()
        os.kill(pid, signal.SIGKILL)
        assert server.ended(SECONDS) == Ended(pid, -signal.SIGKILL)
        assert parent_of(start(server)) == os.getpid()


@pytest.mark.parametrize("lost", ["server is stopped", "server is killed"])
def test_a_lost_server_does_not_hide_the_end_of_its_child(lost: str) -> None:
    with started() as server:
        pid = start(server)
        server_pid = parent_of(pid)
        os.kill(server_pid, signal.SIGSTOP if lost == "server is stopped" else signal.SIGKILL)
        server.kill()
        assert server.ended(SECONDS) == Ended(pid, -signal.SIGKILL)
        assert (parent_of(start(server)) == server_pid) is (lost == "server is stopped")


@pytest.mark.parametrize("stopped", ["nothing", "child", "server"])
def test_no_child_outlives_the_end_of_its_parents_line(stopped: str) -> None:
    with started() as server:
        pid = start(server)
        handle = os.pidfd_open(pid)
        if stopped != "nothing":
            os.kill(pid if stopped == "child" else parent_of(pid), signal.SIGSTOP)
    assert is_gone(handle)


def test_what_still_prepares_ends_with_its_parents_line(tmp_path: Path) -> None:
    (tmp_path / "prepares").touch()
    with started(f"os.remove({str(tmp_path / 'prepares')!r}); {WAITS}") as server:
        process = psutil.Process(server.pid)
        while any(tmp_path.iterdir()):
            assert process.is_running()
    assert server.ended(0.0) == Ended(process.pid, 0)
