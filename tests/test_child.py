"""Lives that are forked from one process: told apart, ended, replaced; nothing outlives whoever has started them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from descriptors import num_descriptors

from amusd import child
from amusd.child import Ended, Lives, command_of

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are forked on Linux alone"),
]

SECONDS = 60.0
SERVER = f"""
import os, signal, sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from amusd.child import ending_with_parent, serve

def prepare(settings):
    with ending_with_parent():
        exec(settings.get("does", ""))
    return os.getpid() if settings["forks"] else None

def live(channel, settings, orders, prepared):
    channel.say(f"prepared by {{prepared}}")
    exec(orders["does"])
    return orders["code"]

sys.exit(serve(prepare, live))
"""
WAITS = f"time.sleep({SECONDS})"


@contextmanager
def started() -> Iterator[Lives]:
    lives = Lives([sys.executable, "-c", SERVER])
    try:
        yield lives
    finally:
        lives.close()


def start(lives: Lives, does: str = "", *, code: int = 0, forks: bool = True) -> None:
    lives.prepare({"forks": forks})
    lives.start({"does": does, "code": code})


def end_of(lives: Lives, does: str = "", *, code: int = 0, forks: bool = True) -> Ended:
    start(lives, does, code=code, forks=forks)
    end = lives.ended(SECONDS)
    assert end is not None
    return end


def await_pid(lives: Lives) -> int:
    while lives.is_preparing:
        assert lives.ended(0.01) is None
    assert lives.pid is not None
    return lives.pid


def server_of(lives: Lives) -> int:
    assert lives._server is not None
    return lives._server.pid


def is_gone(handle: int) -> bool:
    try:
        return bool(select.select([handle], [], [], SECONDS)[0])
    finally:
        os.close(handle)


def test_the_command_finds_this_very_package_whatever_the_current_directory_holds(tmp_path: Path) -> None:
    for name in ("amusd", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the current directory')")
    done = subprocess.run(command_of("amusd.child"), cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert f"cannot import name 'main' from 'amusd.child' ({child.__file__})" in done.stderr


def test_each_life_is_a_process_of_its_own_with_what_was_prepared_once(capfd: pytest.CaptureFixture[str]) -> None:
    before = num_descriptors()
    with started() as lives:
        ends = [end_of(lives, code=7), end_of(lives, "raise ValueError('as told')")]
        start(lives, WAITS)
        killed = await_pid(lives)
        lives.kill()
        ends += [lives.ended(SECONDS) or pytest.fail("it was not killed"), end_of(lives)]
        server = server_of(lives)
    assert [end.code for end in ends] == [7, 1, -signal.SIGKILL, 0]
    assert ends[2].pid == killed
    assert len({server, *(end.pid for end in ends)}) == 5
    assert {end.said for end in ends} == {f"prepared by {server}"}
    assert "ValueError: as told" in capfd.readouterr().err
    assert num_descriptors() == before


def test_where_nothing_is_prepared_each_life_is_the_process_itself() -> None:
    with started() as lives:
        first = end_of(lives, code=3, forks=False)
        start(lives, WAITS, forks=False)
        os.kill(server_of(lives), signal.SIGKILL)
        second = lives.ended(SECONDS)
        assert second is not None
        assert second.pid == server_of(lives)
    assert (first.code, first.said, second.code) == (3, "prepared by None", -signal.SIGKILL)


def test_the_end_of_a_life_that_was_given_up_is_not_taken_for_that_of_the_next() -> None:
    with started() as lives:
        start(lives, WAITS)
        first = await_pid(lives)
        lives.start({"does": "", "code": 7})
        os.kill(first, signal.SIGKILL)
        end = lives.ended(SECONDS)
    assert end is not None
    assert (end.code, end.pid != first) == (7, True)


@pytest.mark.parametrize("lost", ["server is stopped", "server is killed"])
def test_a_lost_server_does_not_keep_a_life_from_being_replaced(lost: str) -> None:
    with started() as lives:
        start(lives, WAITS)
        life, server = await_pid(lives), server_of(lives)
        os.kill(server, signal.SIGSTOP if lost == "server is stopped" else signal.SIGKILL)
        lives.kill()
        end = lives.ended(SECONDS)
        assert end is not None
        assert (end.pid, end.code) == (life, -signal.SIGKILL)
        assert (end_of(lives).said == f"prepared by {server}") is (lost == "server is stopped")


@pytest.mark.parametrize("stopped", ["nothing", "life", "server"])
def test_no_life_outlives_the_end_of_its_parents_line(stopped: str) -> None:
    with started() as lives:
        start(lives, WAITS)
        life = await_pid(lives)
        handle = os.pidfd_open(life)
        if stopped != "nothing":
            os.kill(life if stopped == "life" else server_of(lives), signal.SIGSTOP)
    assert is_gone(handle)
