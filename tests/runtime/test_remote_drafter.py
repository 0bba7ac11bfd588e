"""A cascade over three workers: no draft changes the middle's text, and none changes the target's answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chains import propose
from drafters.test_cascade import step
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_link import memory_pair
from models import tiny
from table_model import TableModel

from amusd.config import GREEDY, DecodingConfig, Distribution, DrafterConfig, EngineConfig, SamplingParams, TargetConfig
from amusd.drafters.base import Drafter
from amusd.drafters.cascade import CascadeDrafter
from amusd.drafters.model import ModelDrafter
from amusd.drafters.ngram import NgramDrafter
from amusd.engine import Engine
from amusd.runtime.connection import Connection
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.draft_worker import DraftWorker
from amusd.runtime.remote_drafter import RemoteDrafter
from amusd.tracing.recorder import Recorder

CAPACITY = 60
MODEL = TableModel(6, seed=3, max_length=CAPACITY)
INNER: dict[str, Callable[[], Drafter]] = {
    "same": lambda: ModelDrafter(MODEL),
    "stranger": lambda: ModelDrafter(TableModel(6, seed=5, max_length=CAPACITY)),
    "ngram": lambda: NgramDrafter(1),
}
SAMPLED = Distribution(temperature=0.9, seed=4)
TOKENS = st.lists(st.integers(0, 5), min_size=1, max_size=6)
ACTIONS = st.tuples(st.sampled_from(["propose", "propose", "commit", "confirm", "reopen"]), TOKENS, st.integers(0, 9))


class Middle:
    """A cascade and its draft's worker in one thread; `let(n)` runs up to n steps of the draft."""

    def __init__(self, inner: str, distribution: Distribution) -> None:
        own, its = memory_pair()
        self._its = its
        self.worker = DraftWorker(
            link=its, drafters={"inner": [INNER[inner]()]}, incarnation=1, recorder=Recorder("draft")
        )
        self.client = DraftClient(Recorder("target"), Connection(own, 1))
        self.inner = RemoteDrafter(self.client, "inner", 6)
        self.drafter = CascadeDrafter(MODEL, self.inner)
        self.drafter.set_distribution(distribution)

    def let(self, number: int) -> None:
        for _ in range(number):
            if self.worker.working or self._its._incoming.frames:
                self.worker.step()


def own_text(context: list[int], number: int, distribution: Distribution) -> tuple[int, ...]:
    alone = ModelDrafter(MODEL)
    alone.set_distribution(distribution)
    alone.open(context, CAPACITY)
    return tuple(propose(alone, number))


@pytest.mark.parametrize("distribution", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@settings(max_examples=40)
@given(inner=st.sampled_from(sorted(INNER)), prompt=TOKENS, actions=st.lists(ACTIONS, max_size=20))
def test_the_middles_text_is_its_own_whatever_its_draft_does(
    distribution: Distribution, inner: str, prompt: list[int], actions: list[tuple[str, list[int], int]]
) -> None:
    """No message contradicts another, even if the target takes back tokens that the draft has received."""
    middle = Middle(inner, distribution)
    drafter, path = middle.drafter, list[int]()
    drafter.open(prompt, CAPACITY)
    for action, tokens, steps in actions:
        middle.let(steps)
        wanted = min(len(tokens), CAPACITY - drafter.length - len(path))
        if action == "propose" and wanted:
            (proposed,) = step([drafter], [path], wanted)
            assert proposed
            assert proposed == own_text([*drafter.committed, *path], wanted, distribution)[: len(proposed)]
            path += proposed
        elif action == "commit":  # a verdict that the path foresaw, in part or not at all
            number = tokens[0] * len(path) // 6
            drafter.commit([*path[:number], *tokens][: CAPACITY - drafter.length])
            path = []
        elif action == "confirm":
            number = tokens[0] * len(path) // 5
            drafter.commit(path[:number])
            path = path[number:]
        elif action == "reopen":
            context, path = [*drafter.committed], []
            drafter.close()
            drafter.open(context, CAPACITY)
        assert drafter.length == drafter.inner.length
    assert middle.client.connection.failure is None


def test_a_middle_without_its_draft_drafts_alone() -> None:
    middle = Middle("same", GREEDY)
    middle.drafter.open((1, 2, 3), CAPACITY)
    middle.let(8)
    text = [*step([middle.drafter], [[]], 4)[0]]
    middle._its.kill()
    for _ in range(6):
        text += step([middle.drafter], [text], 4)[0]
    assert middle.client.connection.failure is not None
    assert tuple(text) == own_text([1, 2, 3], len(text), GREEDY)
    middle.drafter.commit((*text[:1], 5, 5))
    assert len(step([middle.drafter], [[]], 4)[0]) == 1
    middle.drafter.close()


@pytest.mark.long
def test_three_processes_give_the_answer_of_plain_decoding(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("target", "middle", "small")]
    for number, folder in enumerate(folders):
        config = tiny.tiny_config(num_hidden_layers=3 - number, vocab_size=300)
        tiny.save_checkpoint(folder, config, tiny.byte_tokenizer())
    target, middle, small = map(str, folders)
    drafter = DrafterConfig(kind="cascade", model=middle, inner=small, inner_device="cpu", dtype="float32")
    config = EngineConfig(
        target=TargetConfig(kind="hf", model=target, dtype="float32"), drafters=(drafter,), max_model_len=64
    )
    wanted = SamplingParams(max_new_tokens=24)
    with Engine.start(config) as engine:
        expected = engine.generate("abc", wanted, decoding=DecodingConfig(mode="autoregressive")).token_ids
        for mode in ("synchronous", "asynchronous"):
            answer = engine.generate("abc", wanted, decoding=DecodingConfig(mode=mode, max_silence_seconds=60))
            assert answer.token_ids == expected
            if mode == "synchronous":  # which waits for candidates
                assert answer.metrics.num_verified > 0
        assert engine.draft.failure is None
