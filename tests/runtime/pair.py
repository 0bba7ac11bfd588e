"""A target and a draft over table models in one process: the real workers, sessions, drafters and wire format."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from memory_link import MemoryTransport, memory_pair
from oracle import OracleDrafter
from passes import forward, prefilled
from table_model import TableModel, TableTokenizer

from amusd.checkpoints.tokenizer import Tokenizer
from amusd.child import Ended
from amusd.clock import MONOTONIC, Clock
from amusd.config import DecodingConfig, EngineConfig, SamplingParams
from amusd.drafters.base import Drafter
from amusd.drafters.synthetic import Schedule
from amusd.engine import Engine
from amusd.models.numerics import Numerics
from amusd.models.passes import ModelOutput, Rows
from amusd.policies.base import Policy
from amusd.policies.schedules import ContinuousPolicy
from amusd.runner.model_runner import ModelRunner
from amusd.runtime import draft_client
from amusd.runtime.connection import Connection
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.draft_process import TOLD
from amusd.runtime.draft_server import DraftServer, Offer
from amusd.runtime.target_sequence import TargetSequence
from amusd.runtime.target_worker import TargetWorker
from amusd.runtime.verifier import Request
from amusd.sampling.stopping import StopChecker
from amusd.tracing.events import Event
from amusd.tracing.recorder import Recorder
from amusd.transport.base import Transport
from amusd.types import Mode, Token

VOCAB_SIZE = 50
WIDTH = 9
PROMPT = (3, 1, 4, 1, 5)
TIMEOUT_SECONDS = 60.0
Factories = Mapping[str, Callable[[], Drafter]]


class PacedModel(TableModel):
    """A table model whose passes take time, as a device's would: the other thread computes meanwhile."""

    pass_seconds = 0.0

    def run(self, batch: Sequence[Rows], steps: int = 1) -> list[ModelOutput]:
        time.sleep(self.pass_seconds)
        return super().run(batch)


def paced_model(pass_seconds: float, prefill_chunk: int = 256) -> PacedModel:
    numerics = Numerics(width=WIDTH, fixed=False, has_borders=False, prefill_chunk=prefill_chunk, num_tracks=3)
    model = PacedModel(VOCAB_SIZE, seed=7, max_length=400, numerics=numerics)
    model.pass_seconds = pass_seconds
    return model


def target_model() -> TableModel:
    return TableModel(VOCAB_SIZE, seed=7, max_length=400, numerics=Numerics(width=WIDTH, fixed=False, num_tracks=3))


def reference(num_tokens: int, prompt: tuple[int, ...] = PROMPT) -> tuple[int, ...]:
    """Prompt and answer of plain decoding, computed directly by the model, without session or worker."""
    model = target_model()
    tokens = list(prompt)
    for _ in range(num_tokens):
        cache = prefilled(model, tokens[:-1], len(tokens))
        tokens += forward(model, tokens[-1:], cache).choose()
    return tuple(tokens)


class KeepingRecorder(Recorder):
    """A recorder that keeps its events after `flush`."""

    def __init__(self, role: str, clock: Clock = MONOTONIC) -> None:
        super().__init__(role, clock=clock)
        self.events: list[Event] = []
        self.listeners = (self.events.append,)


class DraftThread(DraftServer):
    """One incarnation of the draft, on a thread of its own, and its exit code."""

    code: int | None = None

    def __init__(self, drafts: DraftThreads, link: MemoryTransport) -> None:
        super().__init__(EngineConfig(), "", is_own=True, recorder=KeepingRecorder("draft"))
        self.link = link
        made = {name: [make() for _ in range(drafts.max_num_seqs)] for name, make in drafts.factories.items()}
        self.thread = threading.Thread(target=self._run, args=(Offer(made, ""),), daemon=True)
        self.thread.start()

    def _run(self, offer: Offer) -> None:
        try:
            self.code = self.serve_target(self.link, offer)
        finally:
            self.link.close()


@dataclass
class DraftThreads:
    """Starts drafts on threads, as soon as a target connects. A `DraftSource`."""

    factories: Factories
    max_num_seqs: int
    can_repeat: bool
    wrap: Callable[[MemoryTransport], Transport]
    delays: Mapping[str, Any]
    incarnations: list[DraftThread] = field(default_factory=list)
    process = is_here = True

    def start(self) -> bool:
        return not self.incarnations or not self.incarnations[-1].thread.is_alive()

    def connect(self) -> Transport:
        target_end, draft_end = memory_pair(**self.delays)
        self.incarnations.append(DraftThread(self, draft_end))
        return self.wrap(target_end)

    def ended(self, _timeout: float, /) -> Ended | None:
        return None

    def drop(self) -> None:
        """Kill the link, and wait until the draft has ended: the next one can begin at once."""
        self.incarnations[-1].link.kill()
        self.incarnations[-1].thread.join(TIMEOUT_SECONDS)

    def stop(self) -> None:
        """Wait until all incarnations have ended."""
        for incarnation in self.incarnations:
            incarnation.link.close()
            incarnation.thread.join(TIMEOUT_SECONDS)
            assert not incarnation.thread.is_alive(), "a draft did not end"
            assert incarnation.code in (0, TOLD, None)  # where a test has killed its link


@contextmanager
def engine_of(
    model: ModelRunner,
    tokenizer: Tokenizer,
    factories: Factories,
    *,
    max_num_seqs: int = 1,
    restarts: bool = False,
    wrap_target_link: Callable[[MemoryTransport], Transport] = lambda link: link,
    **delays: Any,
) -> Iterator[tuple[Engine, DraftThreads]]:
    """An engine whose draft offers `factories`.

    A lost draft is replaced if `restarts`. All have ended well when this returns.
    """
    drafts = DraftThreads(factories, max_num_seqs, restarts, wrap_target_link, delays)
    recorder = KeepingRecorder("target")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as running:
        patch.setattr(draft_client, "FINAL_PROGRESS_SECONDS", TIMEOUT_SECONDS)  # however slow the machine is
        connection = Connection.to(drafts, EngineConfig(startup_timeout_seconds=TIMEOUT_SECONDS), running)
        connection.await_first(tokenizer.fingerprint)
        client = DraftClient(recorder, connection, hello_seconds=TIMEOUT_SECONDS)
        worker = TargetWorker(model, recorder, client, max_num_seqs)
        with Engine(worker, tokenizer, drafters=list(factories)) as engine:
            yield engine, drafts


@contextmanager
def restarting_pair(
    factories: Factories,
    *,
    eos_token_id: int | None = None,
    pass_seconds: float = 0.002,
    prefill_chunk: int = 256,
    restarts: bool = True,
    **options: Any,
) -> Iterator[tuple[Engine, DraftThreads]]:
    """`engine_of` over table models, with drafts that are replaced when they are lost."""
    tokenizer, model = TableTokenizer(VOCAB_SIZE, eos_token_id), paced_model(pass_seconds, prefill_chunk)
    with engine_of(model, tokenizer, factories, restarts=restarts, **options) as (engine, drafts):
        yield engine, drafts


@contextmanager
def pair(factories: Factories, **options: Any) -> Iterator[tuple[Engine, DraftThread]]:
    """The same with one draft, which nothing replaces."""
    with restarting_pair(factories, restarts=False, **options) as (engine, drafts):
        yield engine, drafts.incarnations[0]


def plain_engine(max_num_seqs: int = 4, pass_seconds: float = 0.0, eos_token_id: int | None = None) -> Engine:
    """An engine without a draft."""
    recorder = KeepingRecorder("target")
    client = DraftClient(recorder)
    worker = TargetWorker(paced_model(pass_seconds), recorder, client, max_num_seqs)
    return Engine(worker, TableTokenizer(VOCAB_SIZE, eos_token_id))


def oracle(num_tokens: int, schedule: Schedule) -> Callable[[], Drafter]:
    """A drafter that knows plain decoding's answer, for `num_tokens` and a margin."""
    answer = reference(num_tokens + 20)
    return lambda: OracleDrafter(answer, schedule, VOCAB_SIZE)


def decoding(mode: Mode, length: int = 4, **changes: object) -> DecodingConfig:
    """A schedule with candidate blocks of at most `length` tokens, which waits for a slow draft.

    `policy`: a setting's value, or "waiting", the one above.
    """
    if changes.get("policy") == "waiting":
        changes["policy"] = "runtime.pair:waiting"
    settings: dict[str, object] = {
        "max_lookahead": max(length, 2), "num_speculative_tokens": length, "max_silence_seconds": 20.0, **changes
    }  # fmt: skip
    return DecodingConfig(mode=mode, **settings)  # type: ignore[arg-type]  # the tests choose the fields


def waiting(config: DecodingConfig, *, can_branch: bool) -> Policy:
    """A chain for which every pass waits, so that candidates are judged whatever the timing."""
    waits = {"min_candidates": 1, "max_wait_passes": 1e6}
    return ContinuousPolicy(max_lookahead=config.max_lookahead, tokens_per_message=1, always_waits=True, **waits)


def params(num_tokens: int, stop: tuple[str, ...] = ()) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, stop=stop)


def decode(worker: TargetWorker, request: Request, stop: StopChecker) -> Generator[Token, None, TargetSequence]:
    """The tokens of one sequence, and how it ended. Closing the generator aborts the sequence."""
    sequence = worker.admit(request, stop)
    try:
        while not sequence.is_over:
            num_read = len(sequence.tokens)
            worker.step()
            yield from sequence.tokens[num_read:]
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


def await_restarts(engine: Engine, number: int) -> None:
    """Compute until this many lost drafts were replaced."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while engine.draft.num_restarts < number:
        assert time.monotonic() < deadline, "no draft came back"
        engine.scheduler.step()
