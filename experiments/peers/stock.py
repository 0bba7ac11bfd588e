"""`transformers.generate` in a process of its own, which answers one request after another over a pipe.

Its threads and cores are set before torch is loaded, as users set them; while another system is timed, it waits.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from amusd.errors import PeerFailedError

ANSWER_SECONDS = 600.0
"""Longest that loading, or one answer, may take."""
ENDING_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Way:
    """How to generate: plain, with an assistant (`draft_tokens` a round; None: as transformers chooses), by lookup."""

    assisted: bool = False
    draft_tokens: int | None = None
    prompt_lookup: int | None = None


WAYS = {
    "plain": Way(),
    "assisted, its own schedule": Way(assisted=True),
    "assisted, 2 tokens": Way(assisted=True, draft_tokens=2),
    "assisted, 4 tokens": Way(assisted=True, draft_tokens=4),
    "prompt lookup, 4 tokens": Way(prompt_lookup=4),
    "prompt lookup, 10 tokens": Way(prompt_lookup=10),
}


class StockTransformers:
    """The parent's end. `close` ends the process."""

    def __init__(self, target: Path, draft: Path, *, dtype: str, num_threads: int, cores: set[int]) -> None:
        """`cores`: what the process may run on; empty: all."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, str(target), str(draft), dtype, num_threads, cores)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    def generate(self, way: str, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], int]:
        """The tokens, and the nanoseconds they took in that process. Raises `PeerFailedError`."""
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
            raise PeerFailedError("the process with transformers has died; what it said is above") from error
        raise PeerFailedError(f"the process with transformers did not answer within {ANSWER_SECONDS:.0f} s")


def _serve(connection: Connection, target: str, draft: str, dtype: str, num_threads: int, cores: set[int]) -> None:
    """The child's whole life: it ends when the parent closes the pipe."""
    from amusd.runtime.cores import pin_to
    from launch.devices import set_threads

    pin_to(cores)
    set_threads(num_threads)
    import torch

    from amusd.commands.bench.peer import GeneratePeer

    torch.set_num_threads(num_threads)
    model, assistant = (GeneratePeer(path, dtype=dtype, device="cpu") for path in (target, draft))
    connection.send("loaded")
    while True:
        try:
            name, prompt, num_tokens = connection.recv()
        except EOFError:
            return
        way = WAYS[name]
        assistant.draft(way.draft_tokens)
        began = time.perf_counter_ns()
        tokens = model.generate(
            prompt, num_tokens, assistant=assistant if way.assisted else None, prompt_lookup=way.prompt_lookup
        )
        connection.send((tokens, time.perf_counter_ns() - began))
