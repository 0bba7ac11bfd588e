"""The links that the contract suite runs, behind one small interface."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from memory_link import MemoryTransport, memory_pair

from amusd.protocol.messages import Message
from amusd.transport.base import Transport
from amusd.transport.delayed import DelayedTransport
from amusd.transport.shared_memory import SharedMemoryTransport
from amusd.transport.torch_distributed import TorchDistributedTransport
from amusd.transport.zeromq import ZeroMQTransport

NONCE = 0xFEEDFACE12345678
DEADLINE = 20.0
"""Seconds after which a test gives up; far beyond what anything here takes."""


class Link(Protocol):
    """Makes the two ends of a link, one after the other."""

    def listen(self) -> Transport: ...
    def connect(self) -> Transport: ...
    def inject(self, end: Transport, frame: bytes) -> None:
        """Send any bytes from an end that has a peer."""
        ...

    def close(self) -> None: ...


class MemoryLink:
    def __init__(self, max_delay_seconds: float = 0.0) -> None:
        self._ends = memory_pair(seed=1, max_delay_seconds=max_delay_seconds, nonce=NONCE)

    def listen(self) -> Transport:
        return self._ends[0]

    def connect(self) -> Transport:
        return self._ends[1]

    def inject(self, end: Transport, frame: bytes) -> None:
        assert isinstance(end, MemoryTransport)
        end.inject(frame)

    def close(self) -> None:
        for end in self._ends:
            end.close()


class ZeroMQLink:
    def __init__(self, address: str | None) -> None:
        self._wanted = address
        self._address = ""
        self._ends: list[ZeroMQTransport] = []

    def listen(self) -> Transport:
        end = ZeroMQTransport.bind(self._wanted, NONCE)
        self._address = end.address
        self._ends.append(end)
        return end

    def connect(self) -> Transport:
        self._ends.append(ZeroMQTransport.connect(self._address, NONCE))
        return self._ends[-1]

    def inject(self, end: Transport, frame: bytes) -> None:
        assert isinstance(end, ZeroMQTransport)
        end._socket.send(frame)

    def close(self) -> None:
        for end in self._ends:
            end.close()


class SharedMemoryLink:
    def __init__(self) -> None:
        self._ends: list[SharedMemoryTransport] = []

    def listen(self) -> Transport:
        self._ends.append(SharedMemoryTransport.bind(NONCE))
        return self._ends[-1]

    def connect(self) -> Transport:
        self._ends.append(SharedMemoryTransport.connect(self._ends[0].address, NONCE))
        return self._ends[-1]

    def inject(self, end: Transport, frame: bytes) -> None:
        assert isinstance(end, SharedMemoryTransport)
        end._put(frame)

    def close(self) -> None:
        for end in self._ends:
            end.close()


class GlooLink:
    def __init__(self) -> None:
        self._ends: list[TorchDistributedTransport] = []

    def listen(self) -> Transport:
        self._ends.append(TorchDistributedTransport.bind(None, NONCE))
        return self._ends[-1]

    def connect(self) -> Transport:
        self._ends.append(TorchDistributedTransport.connect(self._ends[0].address, NONCE))
        return self._ends[-1]

    def inject(self, end: Transport, frame: bytes) -> None:
        assert isinstance(end, TorchDistributedTransport)
        end._put(frame)

    def close(self) -> None:
        for end in self._ends:
            end.close()


class DelayedLink(MemoryLink):
    """A memory link whose ends hold messages back."""

    def __init__(self) -> None:
        super().__init__()
        self._wrapped = {id(end): DelayedTransport(end, 0.002) for end in self._ends}

    def listen(self) -> Transport:
        return self._wrapped[id(self._ends[0])]

    def connect(self) -> Transport:
        return self._wrapped[id(self._ends[1])]

    def inject(self, end: Transport, frame: bytes) -> None:
        assert isinstance(end, DelayedTransport)
        super().inject(end._link, frame)


LINKS: dict[str, Callable[[], Link]] = {
    "memory": MemoryLink,
    "memory, delayed": lambda: MemoryLink(max_delay_seconds=0.002),
    "memory, held back": DelayedLink,
    "zeromq over a socket file": lambda: ZeroMQLink(None),
    "zeromq over tcp": lambda: ZeroMQLink("tcp://127.0.0.1:*"),
    "gloo": GlooLink,
}
if hasattr(os, "memfd_create"):
    LINKS["shared memory"] = SharedMemoryLink


def fill(end: Transport, message: Message) -> None:
    """Send to a peer that does not read, until the link refuses."""
    for _ in range(1_000_000):
        end.send(message)


def expect(end: Transport) -> Message:
    """The next message, which has to come."""
    message = end.receive(DEADLINE)
    assert message is not None, f"nothing came within {DEADLINE} s"
    return message
