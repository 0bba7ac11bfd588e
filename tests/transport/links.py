"""The links that the contract suite runs, with one small interface."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from faults.link import Wires
from faults.weather import Weather
from faults.world import World
from memory_link import memory_pair
from runtime import clocked
from runtime.clocked import Clock

from amusd.config import TransportConfig
from amusd.protocol.messages import Message, Verdict
from amusd.simulation.clock import Direction, VirtualTime
from amusd.simulation.cost import NOTHING
from amusd.transport.base import Link, Transport
from amusd.transport.factory import connect, listen

NONCE = 0xFEEDFACE12345678
DEADLINE = 20.0
VERDICT = Verdict(1, 1, 0, 0, (5,))


@dataclass
class Pair:
    bind: Callable[[str], Link]
    reach: Callable[[str], Link | None]
    address: str = "{}"
    """Address of the listening end; `{}` stands for a private folder."""
    ends: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.address = self.address.format(self._folder.name)

    def listen(self) -> Any:
        self.ends.append(self.bind(self.address))
        return self.ends[-1]

    def connect(self, address: str | None = None) -> Any:
        end = self.reach(address or self.ends[0].address)
        assert end is not None
        self.ends.append(end)
        return end

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self._folder.cleanup()


def _memory(delay_seconds: float = 0.0) -> Pair:
    target, draft = memory_pair(seed=1, nonce=NONCE)
    target.delay_seconds = draft.delay_seconds = delay_seconds
    return Pair(lambda _: target, lambda _: draft)


def _of(config: TransportConfig, address: str) -> Pair:
    on_cpu = ("cpu", "cpu")
    return Pair(lambda at: listen(config, at, None, on_cpu), lambda at: connect(config, at, NONCE, on_cpu), address)


PROCESS_LINKS: dict[str, Callable[[], Pair]] = {
    "zeromq over a socket file": lambda: _of(TransportConfig(kind="zeromq"), "ipc://{}/link"),
    "zeromq over tcp": lambda: _of(TransportConfig(kind="zeromq"), "tcp://127.0.0.1:*"),
    "gloo": lambda: _of(TransportConfig(kind="gloo"), "gloo://{}"),
}
if hasattr(os, "memfd_create"):
    PROCESS_LINKS["shared memory"] = lambda: _of(TransportConfig(), "shm://{}/link")
LINKS: dict[str, Callable[[], Pair]] = {"memory": _memory, "held back": lambda: _memory(0.002), **PROCESS_LINKS}


def _simulated() -> Pair:
    time = VirtualTime(Direction(NOTHING, Random(1)), Direction(NOTHING, Random(1)))
    return Pair(lambda _: time.draft_link, lambda _: time.target_link)


def _of_faults() -> Pair:
    world = World(seed=1)
    wires = Wires(world, Weather(world), any_session=False)
    ends = wires.draft_end(NONCE, world.next_event_within), wires.target_end(NONCE, world.next_event_within)
    return Pair(lambda _: ends[0], lambda _: ends[1])


def _clocked() -> Pair:
    clock = Clock()
    ends = clocked.Link(clock), clocked.Link(clock)
    ends[0].peer, ends[1].peer, ends[0].answers, ends[1].answers = ends[1], ends[0], False, False
    return Pair(lambda _: ends[0], lambda _: ends[1])


VIRTUAL_LINKS = {"simulated": _simulated, "of the fault simulation": _of_faults, "clocked": _clocked}


def fill(end: Transport, message: Message) -> None:
    for _ in range(1_000_000):
        end.send(message)


def expect(end: Transport) -> Message:
    message = end.receive(DEADLINE)
    assert message is not None, f"nothing came within {DEADLINE} s"
    return message
