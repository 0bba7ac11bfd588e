"""The joint law of the first tokens of four answers at a time under the ratio test, each at its own temperature.

Both real workers on one thread; a random schedule decides what has come when a pass begins.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sampling.law import NUM_TOKENS, PROMPT, VOCAB_SIZE, Experiment, fit
from table_model import TableModel
from torch import Tensor

from amusd.config import Distribution
from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.base import Makers
from amusd.policies.schedules import ChainPolicy
from amusd.protocol.messages import PROTOCOL_VERSION, Hello, Message
from amusd.protocol.wire import decode, encode
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.draft_worker import DraftWorker
from amusd.runtime.target_sequence import Request, TargetSequence
from amusd.runtime.target_worker import TargetWorker
from amusd.sampling.ratio_test import RatioTest
from amusd.sampling.sampler import TEMPERATURE
from amusd.sampling.stopping import StopChecker
from amusd.tracing.recorder import Recorder
from amusd.types import Role

MAX_LENGTH = len(PROMPT) + NUM_TOKENS + 2
FEW = 300
"""Answers of each of the four; the defect below is exposed by them."""
PLAIN = Distribution(temperature=1.0, acceptance="rejection")
FOUR = (
    replace(PLAIN, temperature=4.0),
    replace(PLAIN, temperature=2.0, top_k=3),
    replace(PLAIN, temperature=3.0, top_p=0.8),
    replace(PLAIN, temperature=6.0, min_p=0.3),
)
"""Logits of the table are in [0, 8)."""


class Rows(TableModel):
    """A table model whose rows the law can be computed from."""

    def row(self, prefix: tuple[int, ...]) -> Tensor:
        cache = self.new_cache(len(prefix))
        self.prefill(prefix[:-1], cache)
        return self.forward(prefix[-1:], cache).logits[0]


class End:
    """One end of a link on one thread; frames cross it. The draft has a turn when the target looks for a message."""

    def __init__(self, inbox: deque[bytes], outbox: deque[bytes]) -> None:
        self._inbox, self._outbox = inbox, outbox
        self.on_receive: Any = lambda: None

    def send(self, message: Message) -> None:
        self._outbox.append(encode(message, 7))

    def receive(self, timeout: float) -> Message | None:
        self.on_receive()
        return decode(self._inbox.popleft()).message if self._inbox else None

    def close(self) -> None: ...


class Pair:
    """A target and a draft that serve up to `number` answers at a time."""

    def __init__(self, number: int, seed: int) -> None:
        self._chance = random.Random(seed)
        self.model = Rows(VOCAB_SIZE, seed=1, max_length=MAX_LENGTH)
        to_target, to_draft = deque[bytes](), deque[bytes]()
        target_end, draft_end = End(to_target, to_draft), End(to_draft, to_target)
        draft_model = TableModel(VOCAB_SIZE, seed=2, max_length=MAX_LENGTH)

        def make(number: int) -> list[AutoregressiveDrafter]:
            caches = draft_model.new_caches(number, MAX_LENGTH)
            return [AutoregressiveDrafter(draft_model, cache=cache) for cache in caches]

        self._draft = DraftWorker(draft_end, {"d": Makers(make)}, 1, Quiet("draft"), max_num_seqs=number)
        self._draft.prepare()
        target_end.on_receive = self._let_draft
        peer = Hello(PROTOCOL_VERSION, Role.DRAFT, 1, VOCAB_SIZE, "", ("d",))
        client = DraftClient(Quiet("target"), VOCAB_SIZE, target_end, peer)
        self.worker = TargetWorker(self.model, Quiet("target"), client, number)
        self.num_accepted = self.num_rejected = 0

    def answers(self, distributions: tuple[Distribution, ...], number: int) -> list[Counter[tuple[int, ...]]]:
        """The first tokens of `number` answers to each, of each as many at work as fit."""
        found = [Counter[tuple[int, ...]]() for _ in distributions]
        coming = deque(index for _ in range(number) for index in range(len(distributions)))
        at_work: dict[TargetSequence, int] = {}
        while coming or at_work:
            while coming and self.worker.has_room:
                index = coming.popleft()
                at_work[self._admit(distributions[index], seed=len(coming))] = index
            self.worker.step()
            for sequence, index in tuple(at_work.items()):
                if sequence.session.committed_length >= len(PROMPT) + NUM_TOKENS:
                    found[index][sequence.session.committed[len(PROMPT) :][:NUM_TOKENS]] += 1
                    del at_work[sequence]
                    self.worker.end(sequence)
                    self.num_accepted += sequence.metrics.num_accepted
                    self.num_rejected += sum(
                        n for (judged, kept), n in sequence.metrics.acceptance.items() if kept < judged
                    )
        return found

    def _admit(self, distribution: Distribution, seed: int) -> TargetSequence:
        request = Request(
            prompt=PROMPT,
            max_length=MAX_LENGTH,
            policy=ChainPolicy(max_lookahead=4, min_candidates=0, max_wait_passes=0.0),
            drafter="d",
            distribution=replace(distribution, seed=seed),
        )
        return self.worker.admit(request, StopChecker((), (), MAX_LENGTH - len(PROMPT), str))

    def _let_draft(self) -> None:
        while self._chance.random() < 0.4:
            self._draft.step()


class Quiet(Recorder):
    """Records nothing."""

    def mark(self, name: str, sequence_id: int, fields: dict[str, Any]) -> None: ...

    def span(self, name: str, start_ns: int, end_ns: int, sequence_id: int, **fields: Any) -> None: ...


def holds(pair: Pair, counts: list[Counter[tuple[int, ...]]]) -> list[bool]:
    """For each of the four, whether its answers follow its own law."""
    model: Any = pair.model
    return [fit(count, Experiment(own, target=model).law()).holds for own, count in zip(FOUR, counts, strict=True)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", [FEW, pytest.param(30_000, marks=pytest.mark.long)])
def test_four_answers_at_a_time_follow_each_its_own_law(number: int) -> None:
    """A sound pair fails with probability 4 x 3e-10 (`law.fit`)."""
    pair = Pair(len(FOUR), seed=3)
    assert holds(pair, pair.answers(FOUR, number)) == [True] * 4
    assert pair.num_accepted > number
    assert pair.num_rejected > number


@pytest.mark.long
def test_rows_of_a_pass_that_are_judged_by_another_ones_temperature_are_exposed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if the parameters of a batch were kept by the place in it, which moves on when one ends."""
    made: list[RatioTest] = []
    rows = RatioTest.rows

    def of_the_one_before(self: RatioTest, *args: Any, **options: Any) -> Any:
        made.append(self)
        words = rows(self, *args, **options)
        words.view(np.float64)[:, TEMPERATURE] = made[-2:][0].distribution.temperature
        return words

    monkeypatch.setattr(RatioTest, "rows", of_the_one_before)
    pair = Pair(len(FOUR), seed=3)
    assert not all(holds(pair, pair.answers(FOUR, FEW)))
