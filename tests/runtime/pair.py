"""A target and a draft over table models in one process: the real workers, sessions, drafters and wire format."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from memory_link import MemoryTransport, memory_pair
from oracle import OracleDrafter
from passes import forward
from table_model import TableModel, TableTokenizer

from amusd.config import DecodingConfig, SamplingParams
from amusd.drafters.base import Drafter, Makers, one_by_one
from amusd.drafters.factory import LoadedDrafters
from amusd.drafters.synthetic import Schedule
from amusd.engine import Engine
from amusd.errors import PeerLostError
from amusd.models.language_model import LanguageModel, ModelOutput
from amusd.models.numerics import Numerics
from amusd.models.passes import Rows
from amusd.models.tokenizer import Tokenizer
from amusd.protocol.messages import Candidate, Close, Message
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.handshake import await_hello
from amusd.runtime.startup import serve, target_hello
from amusd.runtime.target_sequence import Request, TargetSequence
from amusd.runtime.target_worker import TargetWorker
from amusd.sampling.stopping import Emission, StopChecker
from amusd.tracing.recorder import Recorder
from amusd.transport.base import Transport
from amusd.types import Mode

VOCAB_SIZE = 50
WIDTH = 9
PROMPT = (3, 1, 4, 1, 5)
TIMEOUT_SECONDS = 30.0
NO_TREES: Mapping[str, Callable[[], Drafter]] = MappingProxyType({})


class PacedModel(TableModel):
    """A table model whose passes take time, as a device's would: the other thread computes meanwhile."""

    pass_seconds = 0.0

    def run(self, batch: Sequence[Rows], steps: int = 1) -> list[ModelOutput]:
        time.sleep(self.pass_seconds)
        return super().run(batch)


def paced_model(pass_seconds: float, prefill_chunk: int = 256) -> PacedModel:
    numerics = Numerics(width=WIDTH, fixed=False, border=None, prefill_chunk=prefill_chunk, num_tracks=3)
    model = PacedModel(VOCAB_SIZE, seed=7, max_length=400, numerics=numerics)
    model.pass_seconds = pass_seconds
    return model


def target_model() -> TableModel:
    return TableModel(VOCAB_SIZE, seed=7, max_length=400, numerics=Numerics(width=WIDTH, fixed=False, num_tracks=3))


def reference(num_tokens: int, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    """Prompt and answer of plain decoding, straight from the model: no session, no worker."""
    model = target_model()
    tokens = list(prompt)
    for _ in range(num_tokens):
        cache = model.new_cache(len(tokens))
        model.prefill(tokens[:-1], cache)
        tokens.append(int(forward(model, tokens[-1:], cache).logits[0].argmax()))
    return tuple(tokens)


@dataclass
class DraftThread:
    """The draft worker of a pair, on a thread, and how it ended."""

    link: MemoryTransport
    incarnation: int = 1
    error: BaseException | None = None
    recorder: Recorder = field(default_factory=lambda: KeepingRecorder("draft"))

    def run(
        self,
        factories: Mapping[str, Callable[[], Drafter]],
        tree_factories: Mapping[str, Callable[[], Drafter]] = NO_TREES,
        max_num_seqs: int = 1,
    ) -> None:
        chains = {name: one_by_one(make) for name, make in factories.items()}
        trees = {name: one_by_one(make) for name, make in tree_factories.items()}
        makers = {name: Makers(chains.get(name), trees.get(name)) for name in {**chains, **trees}}
        drafters = LoadedDrafters(makers, vocab_size=0, tokenizer_hash="")
        try:
            serve(self.link, drafters, self.recorder, self.incarnation, TIMEOUT_SECONDS, max_num_seqs)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self.error = error
        finally:
            self.link.close()


class SpoilingLink:
    """Passes messages on; every fourth candidate comes as `spoil` makes it, until a close."""

    def __init__(self, link: MemoryTransport, spoil: Callable[[Candidate], Message]) -> None:
        self._link = link
        self._spoil = spoil
        self._num_candidates = 0
        self._is_over = False
        self.num_spoilt = 0
        self.close = link.close

    def send(self, message: Message) -> None:
        self._is_over |= isinstance(message, Close)
        self._link.send(message)

    def receive(self, timeout: float) -> Message | None:
        message = self._link.receive(timeout)
        if not self._is_over and isinstance(message, Candidate) and message.token_ids:
            self._num_candidates += 1
            if self._num_candidates % 4 == 0:
                self.num_spoilt += 1
                return self._spoil(message)
        return message


class KeepingRecorder(Recorder):
    """Keeps its events over `flush`."""

    def flush(self) -> None:
        pass


def meet_draft(
    link: Transport,
    model: LanguageModel,
    tokenizer: Tokenizer,
    recorder: Recorder,
    timeout_seconds: float,
    max_num_seqs: int = 1,
) -> TargetWorker:
    """Shake hands with the draft at the other end of `link`."""
    peer = await_hello(link, target_hello(model.vocab_size, tokenizer), timeout_seconds)
    return TargetWorker(model, recorder, DraftClient(recorder, model.vocab_size, link, peer), max_num_seqs)


@contextmanager
def pair(
    factories: Mapping[str, Callable[[], Drafter]],
    tree_factories: Mapping[str, Callable[[], Drafter]] = NO_TREES,
    *,
    eos_token_id: int | None = None,
    seed: int = 0,
    max_delay_seconds: float = 0.0,
    pass_seconds: float = 0.002,
    max_num_seqs: int = 1,
    wrap_target_link: Callable[[MemoryTransport], Transport] = lambda link: link,
    prefill_chunk: int = 256,
) -> Iterator[tuple[Engine, DraftThread]]:
    """An engine whose draft offers `factories`, and drafts trees with `tree_factories`.

    The draft's thread has ended well when this returns.
    """
    target_end, draft_end = memory_pair(seed=seed, max_delay_seconds=max_delay_seconds)
    draft = DraftThread(draft_end)
    thread = threading.Thread(target=draft.run, args=(factories, tree_factories, max_num_seqs), daemon=True)
    thread.start()
    tokenizer = TableTokenizer(VOCAB_SIZE, eos_token_id)
    worker = meet_draft(
        wrap_target_link(target_end),
        paced_model(pass_seconds, prefill_chunk),
        tokenizer,
        KeepingRecorder("target"),
        TIMEOUT_SECONDS,
        max_num_seqs,
    )
    try:
        with Engine(worker, tokenizer, drafters=list(dict.fromkeys((*factories, *tree_factories)))) as engine:
            yield engine, draft
    finally:
        target_end.close()
        thread.join(TIMEOUT_SECONDS)
        assert not thread.is_alive(), "the draft did not end"
    assert draft.error is None or isinstance(draft.error, PeerLostError)  # where a test has killed its link


def oracle(num_tokens: int, schedule: Schedule) -> Callable[[], Drafter]:
    """A drafter that knows plain decoding's answer, for `num_tokens` and a margin."""
    answer = reference(num_tokens + 20)
    return lambda: OracleDrafter(answer, schedule, VOCAB_SIZE)


def decoding(mode: Mode, length: int = 4, **changes: object) -> DecodingConfig:
    """A schedule whose candidate blocks are at most `length` long, and that waits for a draft that is held up."""
    settings: dict[str, object] = {
        "max_lookahead": max(length, 2), "num_speculative_tokens": length, "max_silence_seconds": 20.0, **changes
    }  # fmt: skip
    return DecodingConfig(mode=mode, **settings)  # type: ignore[arg-type]  # the tests choose the fields


def params(num_tokens: int, stop: tuple[str, ...] = ()) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, stop=stop)


def decode(worker: TargetWorker, request: Request, stop: StopChecker) -> Generator[Emission, None, TargetSequence]:
    """What each pass over one sequence commits, and how it ended. Closing the generator aborts the sequence."""
    sequence = worker.admit(request, stop)
    try:
        while not sequence.is_over:
            worker.step()
            yield from sequence.take()
        if sequence.error is not None:
            raise sequence.error
    finally:
        worker.end(sequence)
    return sequence


def on_pass(engine: Engine, act: Callable[[int], None]) -> list[int]:
    """Call `act` in each pass of the target with its number, from 1; returns the numbers, as they come."""
    model, passes = engine.worker.model, [0]
    run = model.run

    def counted(*args: Any, **options: Any) -> Any:
        passes.append(passes[-1] + 1)
        act(passes[-1])
        return run(*args, **options)

    model.run = counted  # type: ignore[method-assign]
    return passes
