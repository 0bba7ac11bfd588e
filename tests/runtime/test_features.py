"""The features of each committed token reach the drafter once, whatever is lost on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from memory_link import MemoryTransport, memory_pair
from msgspec.structs import replace
from passes import prefilled
from runtime.pair import PROMPT, await_restarts, decoding, pair, params, reference, restarting_pair, target_model
from torch import Tensor

from amusd.answer import Answer
from amusd.drafters.model import ModelDrafter
from amusd.engine import Engine
from amusd.protocol.messages import Close, Features, Message, Open, Verdict
from amusd.runtime.draft_worker import DraftWorker, draft_step
from amusd.runtime.rollback import RollbackManager
from amusd.tracing.recorder import Recorder
from amusd.transport.base import Transport
from amusd.types import Mode

NAME = "reader"
NUM_TOKENS = 30


class ReadingDrafter(ModelDrafter):
    def __init__(self) -> None:
        super().__init__(target_model())
        self.features: dict[int, Tensor] = {}
        self.num_taken = 0
        self.waits = True

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        super().open(token_ids, capacity, fan_out)
        self.features, self.is_ready = {}, not self.waits

    def take_features(self, start: int, features: Tensor) -> None:
        if features.shape[1] != 4:
            raise ValueError(f"{features.shape[1]} numbers")
        self.num_taken, self.is_ready = self.num_taken + len(features), True
        self.features |= dict(enumerate(features, start))


def expected(num_positions: int) -> Tensor:
    model = target_model()
    cache = prefilled(model, reference(NUM_TOKENS)[:num_positions], 400)
    return model.read_features([(cache, range(num_positions))])[0].float()


Spoil = Callable[[bytes], bytes]


class LossyLink:
    def __init__(self, link: Transport, keep: Sequence[bool], spoil: Spoil | None = None) -> None:
        self._link, self._keep, self._spoil = link, list(keep), spoil
        self.address, self.receive, self.close, self.has_room = link.address, link.receive, link.close, link.has_room
        self.sent: list[Features] = []
        self.openings: list[Open] = []

    def send(self, message: Message) -> None:
        if isinstance(message, Open):
            self.openings.append(message)
        if isinstance(message, Features):
            self.sent.append(message)
            if self._keep and not self._keep.pop(0):
                return
            if self._spoil is not None:
                message = replace(message, rows=self._spoil(message.rows))
        self._link.send(message)


def begin(engine: Engine, prompt: tuple[int, ...], mode: Mode, num_tokens: int) -> Answer:
    engine.worker.model.feature_columns = {NAME: slice(0, 4)}
    return engine.submit(prompt, params(num_tokens), decoding=decoding(mode, policy="waiting"), drafter=NAME)


def ask(engine: Engine, prompt: tuple[int, ...], mode: Mode = "synchronous", num_tokens: int = 8) -> tuple[int, ...]:
    """Prompt and answer."""
    return prompt + begin(engine, prompt, mode, num_tokens).result().token_ids


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_the_draft_gets_the_features_of_all_committed_tokens_once(mode: Mode) -> None:
    drafter = ReadingDrafter()
    with pair({NAME: lambda: drafter}) as (engine, _):
        assert ask(engine, PROMPT, mode, NUM_TOKENS) == reference(NUM_TOKENS)
    number = len(drafter.features)
    assert number > len(PROMPT) + NUM_TOKENS // 2
    assert drafter.num_taken == number
    assert sorted(drafter.features) == list(range(number))
    assert torch.equal(torch.stack([drafter.features[position] for position in range(number)]), expected(number))


def test_features_are_sent_from_where_the_draft_goes_on() -> None:
    links: list[LossyLink] = []

    def watched(link: MemoryTransport) -> Transport:
        links.append(LossyLink(link, ()))
        return links[0]

    with pair({NAME: ReadingDrafter}, wrap_target_link=watched) as (engine, _):
        text = ask(engine, PROMPT)
        first = len(links[0].sent)
        ask(engine, text)
        assert links[0].sent[first].start == links[0].sent[first - 1].end
        engine.worker.prefix_caching = False
        for _ in range(2):
            last = len(links[0].sent)
            ask(engine, text)
        assert links[0].sent[last].start == 0
        assert [message.follows for message in links[0].openings] == [0, 1, 2, 0]


def test_a_draft_that_replaces_another_gets_all_features_of_the_next_answer() -> None:
    made: list[ReadingDrafter] = []

    def make() -> ReadingDrafter:
        made.append(ReadingDrafter())
        return made[-1]

    with restarting_pair({NAME: make}) as (engine, drafts):
        text = ask(engine, PROMPT)
        drafts.drop()
        await_restarts(engine, 1)
        ask(engine, text)
        assert {*range(len(text))} <= made[1].features.keys()


SPOILS: dict[str, Spoil | None] = {
    "lost": None,
    "cut": lambda _: b"abc",
    "too wide": lambda _: bytes(10_000),
    "not finite": lambda rows: b"\xc0\x7f" * (len(rows) // 2),
}


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)
def test_lost_and_damaged_features_cost_no_token(spoil: Spoil | None) -> None:
    links: list[LossyLink] = []

    def lossy(link: MemoryTransport) -> Transport:
        links.append(LossyLink(link, [False, True] * 100 if spoil is None else (), spoil))
        return links[0]

    drafter = ReadingDrafter()
    drafter.waits = False
    with pair({NAME: lambda: drafter}, wrap_target_link=lossy) as (engine, _):
        assert ask(engine, PROMPT, "asynchronous", NUM_TOKENS) == reference(NUM_TOKENS)
    assert links[0].sent
    assert bool(drafter.features) == (spoil is None)
    assert all(torch.equal(row, expected(position + 1)[-1]) for position, row in drafter.features.items())


def features_of(start: int, end: int) -> Features:
    rows = expected(end)[start:].bfloat16().view(torch.uint8).numpy().tobytes()
    return Features(1, 1, start, end, rows)


def test_features_wait_for_their_verdict_and_those_for_another_incarnation_are_dropped() -> None:
    target, draft = memory_pair()
    drafter = ReadingDrafter()
    worker = DraftWorker(draft, {NAME: [drafter]}, 1, Recorder("draft"))
    target.send(Open(1, 1, PROMPT, 100, NAME, 8, 1, not_over=(1, 2)))
    target.send(features_of(0, 7))
    target.send(replace(features_of(0, 4), incarnation=2))
    worker.take_in()
    assert not drafter.features
    target.send(Verdict(1, 1, 0, len(PROMPT), (1, 2, 3)))
    worker.take_in()
    assert sorted(drafter.features) == list(range(7))


def test_what_comes_together_with_the_end_is_kept_for_the_sequence_that_follows() -> None:
    target, draft = memory_pair()
    drafter = ReadingDrafter()
    worker = DraftWorker(draft, {NAME: [drafter]}, 1, Recorder("draft"))
    target.send(Open(1, 1, PROMPT, 100, NAME, 8, 1, not_over=(1, 2)))
    worker.take_in()
    for message in (features_of(0, 7), Verdict(1, 1, 0, len(PROMPT), (1, 2, 3)), Close(1, (2,))):
        target.send(message)
    worker.take_in()
    assert tuple(drafter.committed) == (*PROMPT, 1, 2, 3)
    assert sorted(drafter.features) == list(range(7))


def test_a_drafter_that_is_opened_again_gets_its_features_again() -> None:
    drafter = ReadingDrafter()
    manager = RollbackManager(Open(1, 1, PROMPT, 100, NAME, 8, 1), drafter)
    manager.open()
    manager.features.append(features_of(0, 4))
    manager.take_features()
    draft_step([manager])
    drafter.follow = lambda _: 1 / 0  # type: ignore[method-assign, assignment]
    manager.apply(Verdict(1, 1, 0, len(PROMPT), (49, 48)))
    assert sorted(drafter.features) == [0, 1, 2, 3]


def test_a_draft_that_joins_late_gets_the_features_of_the_whole_prefix() -> None:
    drafters: list[ReadingDrafter] = []

    def make() -> ReadingDrafter:
        drafters.append(ReadingDrafter())
        return drafters[-1]

    with restarting_pair({NAME: make}) as (engine, drafts):
        answer = begin(engine, PROMPT, "asynchronous", NUM_TOKENS)
        for _ in range(5):
            next(answer)
        drafts.drop()
        assert answer.result().metrics.num_draft_restarts == 1
    assert answer.token_ids == reference(NUM_TOKENS)[len(PROMPT) :]
    second = drafters[1].features
    number = len(second)
    assert number > len(PROMPT) + 5
    assert sorted(second) == list(range(number))
    assert torch.equal(torch.stack([second[position] for position in range(number)]), expected(number))
