"""Drafts on threads of the test's process, one after another, each of which can be killed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from memory_link import MemoryTransport, memory_pair
from runtime.pair import (
    NO_TREES,
    TIMEOUT_SECONDS,
    VOCAB_SIZE,
    DraftThread,
    KeepingRecorder,
    paced_model,
)
from table_model import TableTokenizer

from amusd.drafters.base import Drafter
from amusd.engine import Engine
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.draft_restart import FIRST_INCARNATION, DraftRestart
from amusd.runtime.handshake import await_hello
from amusd.runtime.startup import target_hello
from amusd.runtime.target_worker import TargetWorker
from amusd.transport.base import Rendezvous


class DraftThreads:
    """Starts them, as soon as one is wanted. A `DraftSource`."""

    def __init__(
        self,
        factories: Mapping[str, Callable[[], Drafter]],
        tree_factories: Mapping[str, Callable[[], Drafter]],
        max_num_seqs: int,
    ) -> None:
        self._factories = factories
        self._tree_factories = tree_factories
        self._max_num_seqs = max_num_seqs
        self._ends: dict[int, MemoryTransport] = {}
        """The draft's end of each link that was listened on, by nonce."""
        self.lives: list[DraftThread] = []
        self._threads: list[threading.Thread] = []

    def listen(self, nonce: int) -> MemoryTransport:
        target_end, self._ends[nonce] = memory_pair(nonce=nonce)
        return target_end

    pid = None

    def ending(self, timeout: float, /) -> str | None:
        self._threads[-1].join(timeout)
        return None if self._threads[-1].is_alive() else "its thread has ended"

    def tell(self, incarnation: int, rendezvous: Rendezvous) -> None:
        life = DraftThread(self._ends.pop(rendezvous.nonce), incarnation)
        arguments = (self._factories, self._tree_factories, self._max_num_seqs)
        thread = threading.Thread(target=life.run, args=arguments, daemon=True)
        self.lives.append(life)
        self._threads.append(thread)
        thread.start()

    def met(self) -> None:
        pass

    def dismiss(self) -> None:
        self.lives[-1].link.kill()

    def stop(self) -> None:
        """Wait until all of them have ended."""
        for life, thread in zip(self.lives, self._threads, strict=True):
            life.link.close()
            thread.join(TIMEOUT_SECONDS)
            assert not thread.is_alive(), "a draft did not end"


@contextmanager
def restarting_pair(
    factories: Mapping[str, Callable[[], Drafter]],
    tree_factories: Mapping[str, Callable[[], Drafter]] = NO_TREES,
    *,
    max_num_seqs: int = 1,
    eos_token_id: int | None = None,
    pass_seconds: float = 0.002,
    prefill_chunk: int = 256,
) -> Iterator[tuple[Engine, DraftThreads]]:
    """As `pair`, with drafts that are replaced when they are lost."""
    drafts = DraftThreads(factories, tree_factories, max_num_seqs)
    tokenizer, model = TableTokenizer(VOCAB_SIZE, eos_token_id), paced_model(pass_seconds, prefill_chunk)
    own, recorder = target_hello(model.vocab_size, tokenizer), KeepingRecorder("target")
    link = drafts.listen(FIRST_INCARNATION)
    try:
        drafts.tell(FIRST_INCARNATION, Rendezvous(link.address, FIRST_INCARNATION))
        peer = await_hello(link, own, TIMEOUT_SECONDS)
        restart = DraftRestart(drafts, drafts.listen, own, TIMEOUT_SECONDS)
        client = DraftClient(recorder, model.vocab_size, link, peer, draft_restart=restart)
        worker = TargetWorker(model, recorder, client, max_num_seqs)
        with Engine(worker, tokenizer, drafters=list(dict.fromkeys((*factories, *tree_factories)))) as engine:
            yield engine, drafts
    finally:
        drafts.stop()
