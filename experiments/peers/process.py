"""A runtime in its own process, whose threads and cores are set before it is loaded."""

from __future__ import annotations

import multiprocessing
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

from amusd.errors import PeerError

ANSWER_SECONDS = 600.0
"""Longest time for loading, and for one answer."""
ENDING_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Models:
    """Folders of the checkpoints of target and draft, and one for further files."""

    target: Path
    draft: Path
    files: Path


class Runtime(ABC):
    """The target, decoded greedily by another library; end-of-sequence tokens do not end an answer."""

    name: ClassVar[str]
    package: ClassVar[str]
    """What pip installs."""
    ways: ClassVar[Mapping[str, Any]]
    """Its ways to decode; `plain` is one of them."""

    @abstractmethod
    def __init__(self, models: Models, num_threads: int) -> None:
        """Load the models."""

    @abstractmethod
    def generate(self, way: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Exactly `num_tokens` tokens behind `prompt`, without anything cached from earlier calls."""


class RuntimeProcess:
    """The parent's end. `close` ends the process."""

    def __init__(self, kind: type[Runtime], models: Models, *, num_threads: int, cores: set[int]) -> None:
        """`cores`: those that the process may use; empty: all."""
        self._name = kind.name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, models, num_threads, cores), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    def generate(self, way: str, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], int]:
        """The tokens, and their time in that process in nanoseconds. Raises `PeerError`."""
        self._connection.send((way, list(prompt), num_tokens))
        tokens, duration_ns = self._receive()
        return tokens, duration_ns

    def close(self) -> None:
        """End the process; idempotent."""
        self._connection.close()
        self._process.join(ENDING_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self) -> Any:
        try:
            if self._connection.poll(ANSWER_SECONDS):
                return self._connection.recv()
        except (EOFError, OSError) as error:
            raise PeerError(f"the process with {self._name} has died; what it said is above") from error
        raise PeerError(f"the process with {self._name} did not answer within {ANSWER_SECONDS:.0f} s")


def installed(kinds: Iterable[type[Runtime]]) -> dict[type[Runtime], str]:
    """The versions of the installed ones. Prints a line for each of the others."""
    found = {}
    for kind in kinds:
        if distribution := next(iter(distributions(name=kind.package)), None):
            found[kind] = distribution.version
        else:
            print(f"{kind.name} is left out: pip install {kind.package}", file=sys.stderr)
    return found


def _serve(connection: Connection, kind: type[Runtime], models: Models, num_threads: int, cores: set[int]) -> None:
    from amusd.runtime.cores import pin_to
    from launch.environment import set_environment

    pin_to(cores)
    set_environment(num_threads)
    runtime = kind(models, num_threads)
    connection.send("loaded")
    while True:
        try:
            way, prompt, num_tokens = connection.recv()
        except EOFError:
            return
        began = time.perf_counter_ns()
        tokens = runtime.generate(way, prompt, num_tokens)
        connection.send((tokens, time.perf_counter_ns() - began))
