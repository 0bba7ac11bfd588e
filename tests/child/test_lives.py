"""Lives that are forked from one process: told apart, ended, replaced; nothing outlives whoever has started them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from descriptors import num_descriptors

from amusd.child import Ended, Lives

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are forked on Linux alone"),
]

TESTS = Path(__file__).parents[1]
SECONDS = 60.0


@contextmanager
def started(prepares: str = "something") -> Iterator[Lives]:
    """Of a server in `forking.py`; whatever it has started is gone in the end."""
    code = (
        f"import sys; sys.path[:0] = [{str(TESTS.parent)!r}, {str(TESTS)!r}]; from child import forking; forking.main()"
    )
    lives = Lives([sys.executable, "-c", code, prepares])
    try:
        yield lives
    finally:
        lives.close()


def start(lives: Lives, orders: Mapping[str, object]) -> None:
    lives.prepare({})
    lives.start(orders)


def end_of(lives: Lives, **orders: object) -> Ended:
    start(lives, {"what": "end", "code": 0, **orders})
    end = lives.ended(SECONDS)
    assert end is not None
    return end


def await_life(lives: Lives) -> int:
    """Start one that waits; return its process id once it does."""
    start(lives, {"what": "wait", "code": 0})
    return await_fork(lives)


def await_fork(lives: Lives) -> int:
    server = lives.pid
    assert server is not None
    while lives.pid == server:
        assert lives.ended(0.01) is None
    assert lives.pid is not None
    return lives.pid


def is_gone(handle: int) -> bool:
    """Whether the process of this descriptor has ended, or does so in time."""
    try:
        return bool(select.select([handle], [], [], SECONDS)[0])
    finally:
        os.close(handle)


def test_each_life_is_a_process_of_its_own_with_what_was_prepared_once() -> None:
    with started() as lives:
        ends = [end_of(lives, code=code) for code in (0, 7, 0)]
        after_signal = end_of(lives, what="signal")
    assert [end.code for end in ends] == [0, 7, 0]
    assert after_signal.code == -signal.SIGKILL
    assert len({end.pid for end in (*ends, after_signal)}) == 4
    (said,) = {end.said for end in (*ends, after_signal)}
    assert said.startswith("prepared by [")
    assert int(said[len("prepared by [") : -1]) not in {end.pid for end in ends}


def test_where_nothing_is_prepared_each_life_is_the_process_itself() -> None:
    with started("nothing") as lives:
        ends = [end_of(lives, code=code) for code in (3, 0)]
        start(lives, {"what": "wait", "code": 0})
        os.kill(lives.pid or 0, signal.SIGKILL)
        killed = lives.ended(SECONDS)
    assert [(end.code, end.said) for end in ends] == [(3, "prepared by None"), (0, "prepared by None")]
    assert killed is not None
    assert killed.code == -signal.SIGKILL
    assert len({ends[0].pid, ends[1].pid, killed.pid}) == 3


def test_an_error_is_told_in_full_and_ends_that_life_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with started() as lives:
        assert end_of(lives, what="raise").code == 1
        assert end_of(lives).code == 0
    assert "ValueError: as told" in capfd.readouterr().err


def test_a_killed_life_is_followed_by_another_from_the_same_server() -> None:
    with started() as lives:
        said = end_of(lives).said
        first = await_life(lives)
        lives.kill()
        end = lives.ended(SECONDS)
        assert end is not None
        assert (end.pid, end.code) == (first, -signal.SIGKILL)
        second = end_of(lives)
    assert second.said == said
    assert second.pid != first


def test_what_has_initialised_cuda_is_not_forked(capfd: pytest.CaptureFixture[str]) -> None:
    with started("on a GPU") as lives:
        end = end_of(lives)
    assert (end.code, end.said) == (1, "")
    assert "RuntimeError: what was prepared has initialised CUDA" in capfd.readouterr().err


@pytest.mark.parametrize("is_stopped", [False, True])
def test_no_life_outlives_the_end_of_its_parents_line(is_stopped: bool) -> None:
    """Not even one that does not look at it, and one that a signal has stopped."""
    with started() as lives:
        life = await_life(lives)
        handle = os.pidfd_open(life)
        if is_stopped:
            os.kill(life, signal.SIGSTOP)
    assert is_gone(handle)


def test_nothing_stays_open() -> None:
    before = num_descriptors()
    for prepares in ("something", "nothing"):
        with started(prepares) as lives:
            end_of(lives)
            end_of(lives)
    assert num_descriptors() == before


def test_a_fork_of_the_parent_does_not_keep_the_line_open() -> None:
    """The parent is killed; another process, forked from it for a purpose of its own, lives on."""
    code = f"""
import os, signal, sys, time
sys.path[:0] = [{str(TESTS.parent)!r}, {str(TESTS)!r}]
from amusd.child import Lives
server = "import sys; sys.path[:0] = {[str(TESTS.parent), str(TESTS)]!r}; from child import forking; forking.main()"
lives = Lives([sys.executable, "-c", server, "something"])
lives.prepare({{}})
lives.start({{"what": "wait", "code": 0, "leaves": True}})
first = lives.pid
while lives.pid == first:
    lives.ended(0.01)
fork = os.fork()
if fork == 0:
    time.sleep({SECONDS})
    os._exit(0)
print(lives.pid, fork, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        life, fork = map(int, parent.stdout.readline().split())
        try:
            handle = os.pidfd_open(life)
            parent.stdin.write(b"\n")
            parent.stdin.close()
            assert is_gone(handle)
            assert Path(f"/proc/{fork}").exists()
        finally:
            os.kill(fork, signal.SIGKILL)
