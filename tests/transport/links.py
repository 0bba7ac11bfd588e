"""The links that the contract suite runs, behind one small interface."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field

from memory_link import memory_pair

from amusd.config import TransportConfig
from amusd.protocol.messages import Message, Verdict
from amusd.transport.base import Transport
from amusd.transport.factory import connect, listen

NONCE = 0xFEEDFACE12345678
DEADLINE = 20.0
VERDICT = Verdict(1, 1, 0, 0, (5,), 0)


@dataclass
class Link:
    bind: Callable[[str], Transport]
    reach: Callable[[str], Transport | None]
    address: str = "{}"
    """Of the listening end; `{}` stands for a private folder."""
    ends: list[Transport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.address = self.address.format(self._folder.name)

    def listen(self) -> Transport:
        self.ends.append(self.bind(self.address))
        return self.ends[-1]

    def connect(self, address: str | None = None) -> Transport:
        end = self.reach(address or self.ends[0].address)
        assert end is not None
        self.ends.append(end)
        return end

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self._folder.cleanup()


def _memory(delay_seconds: float = 0.0) -> Link:
    target, draft = memory_pair(seed=1, nonce=NONCE)
    target.delay_seconds = draft.delay_seconds = delay_seconds
    return Link(lambda _: target, lambda _: draft)


def _of(config: TransportConfig, address: str) -> Link:
    on_cpu = ("cpu", "cpu")
    return Link(lambda at: listen(config, at, None, on_cpu), lambda at: connect(config, at, NONCE, on_cpu), address)


PROCESS_LINKS: dict[str, Callable[[], Link]] = {
    "zeromq over a socket file": lambda: _of(TransportConfig(kind="zeromq"), "ipc://{}/link"),
    "zeromq over tcp": lambda: _of(TransportConfig(kind="zeromq"), "tcp://127.0.0.1:*"),
    "gloo": lambda: _of(TransportConfig(kind="gloo"), "gloo://{}"),
}
if hasattr(os, "memfd_create"):
    PROCESS_LINKS["shared memory"] = lambda: _of(TransportConfig(), "shm://{}/link")
LINKS: dict[str, Callable[[], Link]] = {"memory": _memory, "held back": lambda: _memory(0.002), **PROCESS_LINKS}


def fill(end: Transport, message: Message) -> None:
    for _ in range(1_000_000):
        end.send(message)


def expect(end: Transport) -> Message:
    message = end.receive(DEADLINE)
    assert message is not None, f"nothing came within {DEADLINE} s"
    return message
