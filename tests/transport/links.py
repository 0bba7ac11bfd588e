"""The links that the contract suite runs, behind one small interface."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from memory_link import memory_pair

from amusd.protocol.messages import Message
from amusd.transport.base import Transport
from amusd.transport.shared_memory import SharedMemoryTransport
from amusd.transport.torch_distributed import TorchDistributedTransport
from amusd.transport.zeromq import ZeroMQTransport

NONCE = 0xFEEDFACE12345678
DEADLINE = 20.0


@dataclass
class Link:
    bind: Callable[[], Transport]
    reach: Callable[[str], Transport]
    ends: list[Transport] = field(default_factory=list)

    def listen(self) -> Transport:
        self.ends.append(self.bind())
        return self.ends[-1]

    def connect(self) -> Transport:
        self.ends.append(self.reach(self.ends[0].address))
        return self.ends[-1]

    def close(self) -> None:
        for end in self.ends:
            end.close()


def _memory(delay_seconds: float = 0.0) -> Link:
    target, draft = memory_pair(seed=1, nonce=NONCE)
    target.delay_seconds = draft.delay_seconds = delay_seconds
    return Link(lambda: target, lambda _: draft)


def _zeromq(address: str | None) -> Link:
    return Link(
        lambda: ZeroMQTransport(address, NONCE, listens=True), lambda at: ZeroMQTransport(at, NONCE, listens=False)
    )


def _shared_memory() -> Link:
    return Link(lambda: SharedMemoryTransport.bind(NONCE), lambda at: SharedMemoryTransport.connect(at, NONCE))


def _gloo() -> Link:
    return Link(
        lambda: TorchDistributedTransport.bind(NONCE, "gloo", ("cpu", "cpu")),
        lambda at: TorchDistributedTransport(at, NONCE, "cpu", 1),
    )


PROCESS_LINKS: dict[str, Callable[[], Link]] = {
    "zeromq over a socket file": lambda: _zeromq(None),
    "zeromq over tcp": lambda: _zeromq("tcp://127.0.0.1:*"),
    "gloo": _gloo,
}
if hasattr(os, "memfd_create"):
    PROCESS_LINKS["shared memory"] = _shared_memory
LINKS: dict[str, Callable[[], Link]] = {
    "memory": _memory,
    "memory, held back": lambda: _memory(0.002),
    **PROCESS_LINKS,
}


def fill(end: Transport, message: Message) -> None:
    for _ in range(1_000_000):
        end.send(message)


def expect(end: Transport) -> Message:
    message = end.receive(DEADLINE)
    assert message is not None, f"nothing came within {DEADLINE} s"
    return message
