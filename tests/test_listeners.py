"""The attack surface of a running pair: open ports, pickles sent there, and the texts of prompts in its output."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.launch.processes import (
    PATIENT,
    ROOM,
    SECONDS,
    amusd_command,
    descendants,
    environment,
    free_port,
    full_pipe,
    num_in,
)

pytestmark = [
    pytest.mark.embedded,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sockets are read from /proc"),
]

MARK = "zanzibarquux"
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


class Canary:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._path),)


def listeners(processes: Sequence[psutil.Process]) -> Iterator[tuple[str, int] | str]:
    for process in processes:
        with suppress(psutil.Error):  # it has just ended
            for one in process.net_connections("all"):
                if one.status == psutil.CONN_LISTEN:
                    yield one.laddr.ip, one.laddr.port
                elif isinstance(one.laddr, str) and one.laddr.startswith("/"):
                    yield one.laddr


def offer(canary: bytes, address: tuple[str, int] | str) -> bool:
    """Send `canary` to `address`, alone and with a length before it; returns True if a listener was there."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(address)
            connection.sendall(canary + len(canary).to_bytes(8, "little") + canary)
        except OSError:
            return False
        return True


LONG = (pytest.param(link, marks=pytest.mark.long) for link in ("tcp", "ranks"))


@pytest.mark.parametrize("link", ["default", *LONG])
def test_a_run_listens_on_this_machine_alone_runs_no_pickle_and_repeats_no_prompt(tmp_path: Path, link: str) -> None:
    canary = pickle.dumps(Canary(tmp_path / "canary"))
    arguments = ["drafter=ngram", f"prompt=Say {MARK} twice.", "run_dir=out", "sampling.max_new_tokens=40", PATIENT]
    if link == "tcp":
        arguments.append(f"transport.address=tcp://127.0.0.1:{free_port()}")
    if link == "ranks":
        arguments.append("target_tensor_parallel_size=2")
    command, (out, into, filling) = amusd_command("generate", *arguments), full_pipe()  # it is read when all was tried
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=into, stderr=subprocess.PIPE)
    os.close(into)
    answer = b""
    watchdog = threading.Timer(SECONDS, process.kill)
    watchdog.start()
    seen: set[tuple[str, int]] = set()
    reached: set[tuple[str, int] | str] = set()
    commands: set[str] = set()
    typed = Path(f"/proc/{process.pid}/cmdline").read_text()
    try:
        while process.poll() is None:
            tree = [psutil.Process(process.pid), *descendants(process.pid)]
            for one in tree:
                with suppress(OSError):
                    commands.add(Path(f"/proc/{one.pid}/cmdline").read_text())
            doors = set(listeners(tree))
            seen |= {door for door in doors if not isinstance(door, str)}
            # a stranger at a loopback port without keys may take the draft's place: it knocks once the pair has met
            has_begun = num_in(out) > filling
            if link == "default" or has_begun:
                reached |= {door for door in doors - reached if offer(canary, door)}
            if has_begun and reached:
                answer, filling = answer + os.read(out, filling + ROOM)[filling:], 0
            # the draft may listen for some milliseconds alone: the target waits until the stranger was there
            has_draft = any("draft_process" in command for command in commands)
            is_held = link == "default" and has_draft and not reached
            process.send_signal(signal.SIGSTOP if is_held else signal.SIGCONT)
            time.sleep(0.02)
        err = process.communicate(timeout=SECONDS)[1].decode()
    finally:
        watchdog.cancel()
        process.kill()
    os.close(out)
    assert process.returncode == 0, err
    assert answer.strip()
    assert bool(seen) == (link != "default")  # a pair of processes on one machine opens no port
    assert {address for address, _ in seen} <= LOOPBACK
    assert reached
    assert not (tmp_path / "canary").exists()
    events = [path.read_text() for path in (tmp_path / "out" / "events").iterdir()]
    assert all(events)
    commands.discard(typed)  # what was typed, which a child still says between its fork and its exec
    assert commands
    assert not [text for text in (err, *events, *commands) if MARK in text]


def test_the_canary_of_these_tests_is_alive(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Canary(tmp_path / "canary")))
    assert (tmp_path / "canary").is_dir()
