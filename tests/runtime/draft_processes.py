"""Drafts over table models in processes of their own, for a target in the test's process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from runtime.pair import (
    PROMPT,
    TIMEOUT_SECONDS,
    VOCAB_SIZE,
    KeepingRecorder,
    oracle,
    paced_model,
    params,
    reference,
)
from table_model import TableTokenizer

from amusd.answer import Answer, Generation
from amusd.config import DecodingConfig, EngineConfig, TransportConfig
from amusd.drafters.synthetic import right_with_probability
from amusd.engine import Engine
from amusd.runtime import draft_process, draft_server, startup
from amusd.runtime.draft_process import DraftSource
from amusd.runtime.draft_server import Offer
from tests.warm import Popen

NUM_TOKENS = 60
EXPECTED = reference(NUM_TOKENS)[len(PROMPT) :]
PASS_SECONDS = 0.001

PROGRAM = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]}
from runtime.draft_processes import main
main()
"""


def main() -> None:
    good = oracle(NUM_TOKENS, right_with_probability(0.8, 3))
    draft_server.prepare = lambda config: Offer({"oracle": [good() for _ in range(config.max_num_seqs)]}, "")
    draft_process.main()


class Survivor:
    def __init__(self, engine: Engine, drafts: DraftSource) -> None:
        self.engine = engine
        self.drafts = drafts

    def answer(self, schedule: DecodingConfig, at: int | None = None, act: Callable[[], None] | None = None) -> Answer:
        answer = self.engine.stream(PROMPT, params(NUM_TOKENS), decoding=schedule)
        for number, _ in enumerate(answer):
            if number == at and act is not None:
                act()
        assert answer.token_ids == EXPECTED
        return answer

    @property
    def pid(self) -> int:
        return self.drafts.process._server.pid

    def kill(self) -> None:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(self.pid).kill()

    def await_help(self, schedule: DecodingConfig) -> Generation:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            generation = self.answer(schedule).generation
            if generation.metrics.num_accepted:
                return generation
        raise AssertionError(f"no draft came back: {self.engine.draft.losses}")


@contextmanager
def survivor(kind: str) -> Iterator[Survivor]:
    """An engine over table models and a link of this kind; its drafts have ended when this returns."""
    config = EngineConfig(transport=TransportConfig(kind=kind))  # type: ignore[arg-type]  # the tests choose it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("amusd.child.subprocess.Popen", Popen)
        patch.setattr(draft_process, "command_of", lambda _: [sys.executable, "-c", PROGRAM])
        loaded = paced_model(PASS_SECONDS), TableTokenizer(VOCAB_SIZE)
        patch.setattr(startup, "load_first_rank", lambda *_: loaded)
        drafts = DraftSource(config)
        with ExitStack() as running:
            worker, tokenizer = startup.connect_target(config, drafts, KeepingRecorder("target"), running)
            with Engine(worker, tokenizer, drafters=["oracle"]) as engine:
                yield Survivor(engine, drafts)
