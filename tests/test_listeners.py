"""What a running pair leaves open: where it listens, what a pickle sent there does, what it repeats of a prompt."""

from __future__ import annotations

import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launch.processes import SECONDS, amusd_command, descendants, environment

pytestmark = [
    pytest.mark.embedded,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sockets are read from /proc"),
]

MARK = "zanzibarquux"
LISTENS = "0A"
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


class Canary:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._path),)


def inodes(pids: list[int]) -> set[str]:
    """Of all sockets that these processes hold."""
    found = set()
    for pid in pids:
        with suppress(OSError):  # it has just ended
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    found.add(str(descriptor.readlink()))
    return {link[len("socket:[") : -1] for link in found if link.startswith("socket:[")}


def tcp_listeners(owned: set[str]) -> Iterator[tuple[str, int]]:
    """Address (hexadecimal, as the kernel prints it) and port."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS and rest[5] in owned:
                address, _, port = local.rpartition(":")
                yield address, int(port, 16)


def socket_files(owned: set[str]) -> Iterator[str]:
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[6] in owned and fields[7].startswith("/"):
            yield fields[7]


def offer(canary: bytes, address: tuple[str, int] | str) -> bool:
    """Send it, as it is and with lengths before it, to whoever listens there; whether somebody did."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(address)
            connection.sendall(canary + len(canary).to_bytes(8, "little") + canary)
        except OSError:
            return False
        return True


@pytest.mark.parametrize(
    "link", ["default", *(pytest.param(link, marks=pytest.mark.long) for link in ("tcp", "ranks"))]
)
def test_a_run_listens_on_this_machine_alone_runs_nobodys_pickle_and_repeats_no_prompt(
    tmp_path: Path, link: str
) -> None:
    canary = pickle.dumps(Canary(tmp_path / "canary"))
    arguments = ["drafter=ngram", f"prompt=Say {MARK} twice.", "run_dir=out", "sampling.max_new_tokens=40"]
    if link == "tcp":
        arguments.append("transport.address=tcp://127.0.0.1:0")
    if link == "ranks":
        arguments.append("target_tensor_parallel_size=2")
    process = subprocess.Popen(
        amusd_command("generate", *arguments),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(2 * SECONDS, process.kill)
    watchdog.start()
    seen: set[tuple[str, int]] = set()
    reached: set[tuple[str, int] | str] = set()
    commands: set[str] = set()
    typed = Path(f"/proc/{process.pid}/cmdline").read_text()
    try:
        while process.poll() is None:
            tree = [process.pid, *(child.pid for child in descendants(process.pid))]
            owned = inodes(tree)
            for pid in tree:
                with suppress(OSError):
                    commands.add(Path(f"/proc/{pid}/cmdline").read_text())
            listeners = set(tcp_listeners(owned))
            doors: set[tuple[str, int] | str] = {("127.0.0.1", port) for _, port in listeners}
            # a stranger at a loopback port without keys may take the draft's place: it knocks once the pair has met
            has_met = select.select([process.stdout], [], [], 0)[0]
            if link == "default" or has_met:
                reached |= {door for door in {*doors, *socket_files(owned)} - reached if offer(canary, door)}
            seen |= listeners
            time.sleep(0.1)
        out, err = process.communicate(timeout=SECONDS)
    finally:
        watchdog.cancel()
        process.kill()
    assert process.returncode == 0, err
    assert out.strip()
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
