"""Two nodes on one machine: two loopback addresses, or two network namespaces with a cable between them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

TARGET_ADDRESS, DRAFT_ADDRESS = "10.77.0.1", "10.77.0.2"
IP_SECONDS = 20.0


@dataclass(frozen=True)
class Network:
    """Two nodes. The target's is the one that the other reaches."""

    target_address: str
    namespaces: tuple[str, str] | None = None
    """Of the target and of the draft; None: both are this machine's own."""

    def on(self, node: int, command: Sequence[str]) -> list[str]:
        """The command that runs this one there: 0 the target's node, 1 the draft's."""
        return [*(() if self.namespaces is None else ("ip", "netns", "exec", self.namespaces[node])), *command]

    def free_port(self) -> int:
        """Of the target's node. Nobody else is in a namespace, and a port that is free here is free there."""
        with socket.create_server((self.target_address if self.namespaces is None else "127.0.0.1", 0)) as probe:
            return int(probe.getsockname()[1])


def loopback() -> Network:
    """The target at an address of its own, the draft at the usual one."""
    return Network("127.0.0.2")


@contextmanager
def cabled_namespaces() -> Iterator[Network]:
    """Two namespaces that reach each other and nothing else; gone with all processes in them when this returns.

    Skips the test where they cannot be made.
    """
    names = (f"amusd-{os.getpid()}-target", f"amusd-{os.getpid()}-draft")
    with ExitStack() as stack:
        for name in names:
            if reason := _ip("netns", "add", name):
                pytest.skip(f"needs the right to make network namespaces (CAP_SYS_ADMIN, iproute2): {reason}")
            stack.callback(_remove, name)
        ends = ("netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        if reason := _ip("link", "add", "name", "cable", *ends):
            pytest.skip(f"needs the right to make a cable between namespaces (CAP_NET_ADMIN): {reason}")
        for name, address in zip(names, (TARGET_ADDRESS, DRAFT_ADDRESS), strict=True):
            for settings in (
                ("address", "add", f"{address}/30", "dev", "cable"),
                ("link", "set", "cable", "up"),
                ("link", "set", "lo", "up"),
            ):
                assert _ip("-n", name, *settings) == ""
        yield Network(TARGET_ADDRESS, names)


def processes_in(network: Network) -> list[int]:
    """All that run in its namespaces."""
    return [pid for name in network.namespaces or () for pid in _processes(name)]


def _ip(*arguments: str) -> str:
    """Run `ip`; return why it failed, or nothing."""
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=IP_SECONDS)
    except FileNotFoundError:
        return "no `ip` here"
    return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""


def _processes(namespace: str) -> list[int]:
    done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, timeout=IP_SECONDS)
    return [int(word) for word in done.stdout.split()]


def _remove(namespace: str) -> None:
    for pid in _processes(namespace):
        os.kill(pid, signal.SIGKILL)
    assert _ip("netns", "delete", namespace) == ""  # the end of the cable that is in it goes too
