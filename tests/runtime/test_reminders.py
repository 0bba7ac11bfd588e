"""A draft that was not told, or whose answers were lost, is told again within the running answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from memory_link import MemoryTransport
from oracle import always_right
from runtime.pair import PROMPT, decoding, oracle, pair, params, reference

from amusd.protocol.messages import Close, Message, Open, Verdict
from amusd.runtime.draft_client import Reminder
from amusd.types import Mode

NUM_TOKENS = 150
SCHEDULES = {
    "chain": decoding(Mode.ASYNCHRONOUS, 4, policy="chain", max_silence_seconds=0.3),
    "windowed": decoding(Mode.ASYNCHRONOUS, 4, policy="windowed", max_silence_seconds=0.3),
    "synchronous": decoding(Mode.SYNCHRONOUS, 4, max_silence_seconds=0.3),
}


class Losing:
    """A link that loses what `lost` says, on its way out."""

    def __init__(self, link: MemoryTransport, lost: Callable[[Message], bool]) -> None:
        self._link = link
        self._lost = lost
        self.receive, self.close = link.receive, link.close

    def send(self, message: Message) -> None:
        if not self._lost(message):
            self._link.send(message)


def lose_first(kind: type[Message], number: int) -> Callable[[Message], bool]:
    seen = 0

    def lost(message: Message) -> bool:
        nonlocal seen
        seen += isinstance(message, kind)
        return isinstance(message, kind) and seen <= number

    return lost


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("kind", "number"), [(Open, 1), (Open, 2), (Verdict, 2)])
def test_what_was_lost_is_said_again(name: str, kind: type[Message], number: int) -> None:
    """Without an opening a draft never speaks; without a verdict it stops for ever once it has run ahead."""
    lost = lose_first(kind, number)
    with pair(
        {"oracle": oracle(NUM_TOKENS, always_right())},
        pass_seconds=0.012,
        wrap_target_link=lambda link: Losing(link, lost),
    ) as (engine, draft):
        answer = engine.generate(PROMPT, params(NUM_TOKENS), decoding=SCHEDULES[name])
    assert answer.token_ids == reference(NUM_TOKENS)[len(PROMPT) :]
    assert answer.metrics.num_accepted > 4
    assert draft.error is None


def test_a_lost_end_of_a_sequence_costs_the_next_one_nothing() -> None:
    """Synchronously every block is there in time, so the draft's steps and counts are the same, whoever went before."""
    with pair(
        {"oracle": oracle(NUM_TOKENS, always_right())},
        wrap_target_link=lambda link: Losing(link, lambda message: isinstance(message, Close)),
    ) as (engine, draft):
        answers = [engine.generate(PROMPT, params(20), decoding=SCHEDULES["synchronous"]) for _ in range(3)]
    assert {answer.metrics.num_accepted for answer in answers} == {16}
    assert [answer.metrics.draft for answer in answers] == [None] * 3  # nobody asked for its counts
    begun = [event.sequence_id for event in draft.recorder.events if event.name == "draft_prefill"]
    ended = [event.sequence_id for event in draft.recorder.events if event.name == "sequence"]
    assert begun == ended == [1, 2, 3]
    assert draft.error is None


def test_a_lost_end_of_a_sequence_costs_no_other_one_its_draft() -> None:
    """The one that began first is at work all the time; those that come and go beside it end without a word."""
    schedule = decoding(Mode.SYNCHRONOUS, 4, max_silence_seconds=5.0)
    with pair(
        {"oracle": oracle(NUM_TOKENS, always_right())},
        max_num_seqs=2,
        wrap_target_link=lambda link: Losing(link, lambda message: isinstance(message, Close)),
    ) as (engine, draft):
        long = engine.submit(PROMPT, params(NUM_TOKENS), decoding=schedule)
        for _ in range(4):
            short = engine.submit(PROMPT, params(20), decoding=schedule)
            assert [next(short).token_id for _ in range(20)] == list(reference(20)[len(PROMPT) :])
        assert long.result().metrics.num_accepted == NUM_TOKENS - NUM_TOKENS // 5
    forgotten = [event.sequence_id for event in draft.recorder.events if event.name == "sequence"]
    assert forgotten == [2, 3, 4, 1, 5]  # at the end all that are left
    assert draft.error is None


def test_reminders_come_at_longer_and_longer_intervals_until_there_is_an_answer() -> None:
    reminder = Reminder(10.0, 0.5)
    due = [step / 10 for step in range(100, 300) if reminder.is_due(step / 10)]
    assert due == [10.5, 11.5, 13.5, 17.5, 25.5]
    reminder.heard(30.0)
    assert not reminder.is_due(30.4)
    assert reminder.is_due(30.5)
