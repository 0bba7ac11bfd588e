"""The messages of a draft and their times, on a clock that only its own work moves."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from oracle import OracleDrafter, always_right
from runtime.clocked import Clock, Link
from runtime.pair import KeepingRecorder
from runtime.table_tree import TableTreeDrafter, spread

from amusd.config.decoding import MAX_BIASES
from amusd.policies.estimates import VerdictClock
from amusd.protocol.draft_session import DraftSession
from amusd.protocol.messages import (
    MAX_DRAFT_PROBS_BYTES,
    Candidate,
    Close,
    Message,
    Open,
    Progress,
    Refused,
    Sampling,
    Shutdown,
    Verdict,
)
from amusd.protocol.wire import encode
from amusd.runtime.draft_worker import IDLE_SECONDS, SIGN_NS, DraftWorker

PROMPT = (3, 1, 4)
ANSWER = tuple(range(10, 30))


class SlowDrafter(OracleDrafter):
    clock: Clock
    seconds = 0.0

    def propose(self, path: Sequence[int], room: int) -> tuple[int, ...]:
        self.clock.pass_by(self.seconds)
        return super().propose(path, room)


class Draft:
    def __init__(
        self,
        *,
        step_seconds: float = 0.01,
        max_length: int = 23,
        max_num_seqs: int = 1,
        num_open: int = 1,
        **opening: int,
    ) -> None:
        self.clock = Clock()
        self.link = Link(self.clock)

        def make() -> SlowDrafter:
            drafter = SlowDrafter((*PROMPT, *ANSWER), always_right(), 50)
            drafter.clock, drafter.seconds = self.clock, step_seconds
            return drafter

        self.recorder = KeepingRecorder("draft", clock=self.clock)
        tree = lambda: TableTreeDrafter(places=spread(1))  # noqa: E731
        drafters = [tree() if opening.get("fan_out") else make() for _ in range(max_num_seqs)]
        self.worker = DraftWorker(self.link, {"test": drafters}, 1, self.recorder)  # type: ignore[arg-type]
        self.max_length = max_length
        self.options = {"max_lookahead": 8, "tokens_per_message": 1} | opening
        self.say(*map(self.opening, range(1, num_open + 1)))

    def opening(self, sequence_id: int, not_over: tuple[int, ...] = ()) -> Open:
        return Open(sequence_id, 1, PROMPT, self.max_length, "test", **self.options, not_over=not_over)

    def end(self, sequence_id: int, not_over: tuple[int, ...] = ()) -> Close:
        return Close(sequence_id, not_over)

    def say(self, *messages: Message) -> None:
        self.link.inbox += messages
        self.worker.step()

    def session(self, sequence_id: int) -> DraftSession:
        return self.worker._sequences[sequence_id].manager.session

    def drafted(self, sequence_id: int) -> tuple[int, ...]:
        said = [said for said in self.link.messages(Candidate) if said.sequence_id == sequence_id]
        return tuple(token_id for candidate in said for token_id in candidate.token_ids)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.worker.step()


def test_a_sequence_goes_on_with_the_drafter_of_the_one_before_and_else_with_what_is_longest_free() -> None:
    draft = Draft(max_num_seqs=3, num_open=0)
    drafters = [*draft.worker._free["test"].values()]
    forgot: list[int] = []
    for number, drafter in enumerate(drafters):
        drafter.forget = partial(forgot.append, number)  # type: ignore[method-assign]

    def serve(sequence_id: int, follows: int = 0) -> int:
        draft.say(replace(draft.opening(sequence_id), follows=follows))
        used = drafters.index(draft.worker._sequences[sequence_id].manager.drafter)
        draft.say(draft.end(sequence_id))
        return used

    assert [serve(1), serve(2), serve(3), serve(4, follows=2), serve(5), serve(6, follows=2)] == [0, 1, 2, 1, 0, 2]
    assert forgot == [0, 1, 2, 0, 2]


def test_long_work_on_one_message_is_no_silence() -> None:
    draft = Draft(step_seconds=0.06, max_lookahead=8, tokens_per_message=8)
    while not draft.link.messages(Candidate):
        draft.worker.step()
    said = [0.0, *(at for at, _ in draft.link.sent)]
    assert max(later - earlier for earlier, later in itertools.pairwise(said)) <= SIGN_NS / 1e9 + 0.06
    assert len(draft.link.messages(Progress)) == 3  # then come the candidates


def test_a_block_of_any_length_travels_in_messages_that_fit_a_frame() -> None:
    draft = Draft(max_length=2000, max_lookahead=1000, tokens_per_message=1000, num_open=0)
    draft.link.inbox.append(draft.opening(1))
    draft.worker.take_in()
    tree, number = draft.session(1).tree, 1000
    tree.take_next(0)
    tree.grow([tree.root], [((7, 1.0),)] * number, [bytes(MAX_DRAFT_PROBS_BYTES)] * number)
    draft.worker._send(draft.worker._sequences[1])
    said = draft.link.messages(Candidate)
    for message in said:
        encode(message, 0)
    assert draft.drafted(1) == (7,) * number
    assert [message.more for message in said] == [True] * (len(said) - 1) + [False]


def test_a_verdict_that_leaves_no_room_is_answered_at_once() -> None:
    """Without this answer the target would wait for candidates that never come."""
    draft = Draft(max_length=len(PROMPT) + 4, max_lookahead=2)
    draft.steps(2)
    said = len(draft.link.messages(Candidate))
    draft.say(Verdict(1, 1, 0, len(PROMPT), (ANSWER[0], ANSWER[1], ANSWER[2])))
    last = draft.link.messages(Candidate)[said:]
    assert last
    assert not last[-1].more


OPENING = Open(2, 1, PROMPT, 23, "test", 8, 1, not_over=(1, 2, 3))
HOSTILE: dict[str, tuple[Message, list[int]]] = {
    "an opening without room": (replace(OPENING, max_length=len(PROMPT) - 1), [2]),
    "an opening for an earlier incarnation": (replace(OPENING, incarnation=7), []),
    "an opening that is over by its own list": (replace(OPENING, not_over=(1, 3)), []),
    "the same opening again": (replace(OPENING, sequence_id=1), []),
    "a verdict after a gap": (Verdict(1, 1, 0, len(PROMPT) + 1, ANSWER[1:2]), [1]),
    "a verdict for nobody": (Verdict(9, 1, 0, len(PROMPT), (1,)), []),
    "a message of its own side": (Candidate(1, 1, len(PROMPT), 0, 1, (0,), (1,), (), more=True), []),
}


@pytest.mark.parametrize(("message", "refused"), HOSTILE.values(), ids=HOSTILE)
def test_what_no_target_should_say_changes_nothing(message: Message, refused: list[int]) -> None:
    """A message that may expect an answer gets one, since the target would take the draft for silent without it."""
    draft = Draft(max_lookahead=4, max_num_seqs=2)
    draft.say(message)
    assert [said.sequence_id for said in draft.link.messages(Refused)] == refused
    draft.steps(9)
    assert set(draft.worker._sequences) == {1}
    assert draft.drafted(1) == ANSWER[:4]


def test_a_sequence_that_was_refused_is_closed_with_counts_of_nothing() -> None:
    """Without this answer the target would wait for the counts."""
    draft = Draft()
    draft.say(Close(2))
    assert draft.link.messages(Refused) == [Refused(2)]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=-1.0),
        Sampling(temperature=math.nan),
        Sampling(acceptance="luck"),
        Sampling(acceptance="matching"),
        Sampling(logit_bias=((0, 0.0),) * (MAX_BIASES + 1)),
    ],
)
def test_a_distribution_that_no_user_could_ask_for_is_refused(sampling: Sampling) -> None:
    draft = Draft(num_open=0)
    draft.say(replace(draft.opening(1), sampling=sampling))
    assert draft.link.messages(Refused) == [Refused(1)]


def test_only_the_newest_of_several_verdicts_is_followed() -> None:
    draft = Draft(max_lookahead=8)
    draft.steps(3)
    older = Verdict(1, 1, 0, len(PROMPT), ANSWER[:1])
    newer = Verdict(1, 1, 0, len(PROMPT), ANSWER[:3])
    draft.say(older, newer)
    sequence = draft.worker._sequences[1]
    assert sequence.manager.session.committed == (*PROMPT, *ANSWER[:3])
    assert sequence.num_rollbacks == 0


def test_waiting_is_counted_and_working_is_not() -> None:
    draft = Draft(step_seconds=0.01, max_lookahead=2)
    draft.steps(1)
    draft.steps(2)  # nothing to do: two waits
    draft.say(Close(1), Shutdown())
    progress = draft.link.messages(Progress)[-1]
    waits = [event for event in draft.recorder.events if event.name == "draft_wait"]
    assert sum(event.duration_ns for event in waits) == 2 * IDLE_SECONDS * 1e9
    assert progress.busy_ns == 2 * 0.01 * 1e9
    assert progress.num_drafted == 2


# Several sequences


def test_each_sequence_with_a_verdict_is_answered_before_the_next_step() -> None:
    draft = Draft(max_num_seqs=3, num_open=3, max_lookahead=2)
    draft.steps(3)
    sent, now = len(draft.link.sent), draft.clock.ns / 1e9
    verdicts = [Verdict(number, 1, 1, len(PROMPT), ANSWER[:1]) for number in (1, 3)]  # all is to be offered again
    draft.say(*verdicts)
    answers = [(at, said.sequence_id, said.token_ids) for at, said in draft.link.sent[sent:]]
    assert answers[:2] == [(now, 1, ANSWER[1:2]), (now, 3, ANSWER[1:2])]
    assert all(at > now for at, _, _ in answers[2:])


def test_where_no_drafter_is_free_a_sequence_is_refused_and_may_ask_again(caplog: pytest.LogCaptureFixture) -> None:
    """The target has more sequences than the draft has drafters; those that are at work go on."""
    draft = Draft(max_num_seqs=2, num_open=2)
    draft.say(draft.opening(3), draft.opening(3), draft.opening(2))
    assert set(draft.worker._sequences) == {1, 2}
    assert [said.sequence_id for said in draft.link.messages(Refused)] == [3, 3]
    draft.say(draft.end(1), draft.opening(3))
    assert set(draft.worker._sequences) == {2, 3}
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "opened no sequence: all 2 drafters 'test' are at work"
    ]
    draft.steps(9)
    assert draft.drafted(2) == draft.drafted(3) == ANSWER[:8]


def test_the_time_of_a_step_is_shared_by_the_rows_that_each_sequence_had() -> None:
    draft = Draft(step_seconds=0.01, max_num_seqs=3, num_open=3, max_lookahead=5)
    draft.say(Verdict(2, 1, 0, len(PROMPT), ANSWER[:1]))
    while draft.worker.working:
        draft.worker.step()
    steps = [event for event in draft.recorder.events if event.name == "draft_step"]
    ends = [(event.start_ns, event.end_ns) for event in steps]
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    assert all(end - start == 10_000_000 for start, end in ends)
    busy = {number: sequence.busy_ns for number, sequence in draft.worker._sequences.items()}
    assert sum(busy.values()) == draft.clock.ns == 16 * 10_000_000
    assert busy == {1: 50_000_000, 2: 60_000_000, 3: 50_000_000}
    assert Counter(event.sequence_id for event in steps) == {1: 5, 2: 6, 3: 5}


def test_a_step_waits_for_verdicts_only_as_long_as_each_sequence_would() -> None:
    class Due(VerdictClock):
        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds = seconds

        def patience_ns(self, now_ns: int) -> int:
            return round(self.seconds * 1e9)

    draft = Draft(max_num_seqs=2, num_open=2, fan_out=3, rows_per_step=3)
    draft.steps(1)
    for first, second, waited in ((0.02, 0.03, 0.02), (0.02, 0.0, 0.0), (0.0, 0.02, 0.0)):
        draft.worker._sequences[1].verdict_clock = Due(first)
        draft.worker._sequences[2].verdict_clock = Due(second)
        assert draft.worker.working
        before = draft.clock.ns
        draft.worker.step()
        assert draft.clock.ns - before == round(waited * 1e9)


class Target:
    """Opens and closes sequences as a target does, and keeps all messages, so that a test can repeat them."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.open: list[int] = []
        self.next_id = 1
        self.said: list[Open | Close] = []

    @property
    def not_over(self) -> tuple[int, ...]:
        return *self.open, self.next_id

    def begin(self) -> None:
        self.open.append(self.next_id)
        self.next_id += 1
        self.remind(len(self.open) - 1)

    def remind(self, index: int) -> None:
        self.said.append(self.draft.opening(self.open[index], self.not_over))

    def end(self, index: int) -> None:
        number = self.open.pop(index)
        self.said.append(self.draft.end(number, self.not_over))


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "begin", "end", "remind", "hear", "hear", "verdict"]), st.integers(0, 99)),
        max_size=60,
    )
)
@example([("begin", 0), ("hear", 0), ("end", 0), ("hear", 0), ("hear", 1)])
def test_no_open_sequence_ends_and_each_number_is_used_once_whatever_is_heard_and_when(
    actions: list[tuple[str, int]],
) -> None:
    """Messages are lost, copied and late by chance; once all openings arrive, all open sequences have a drafter."""
    draft = Draft(max_num_seqs=3, num_open=0, max_lookahead=3)
    target = Target(draft)
    sequences, ended, heard = draft.worker._sequences, set[int](), list[tuple[int, ...]]()

    def hear(message: Open | Close) -> None:
        before = set(sequences)
        draft.say(message)
        ended.update(before - set(sequences))
        heard.append(message.not_over)
        assert not ended & {*target.open, *sequences}
        assert all(number in known or number > max(known) for known in heard for number in sequences)
        assert set(sequences) - before <= {message.sequence_id}
        assert len(draft.worker._not_over) <= 4
        assert len(draft.worker._free["test"]) + len(sequences) == 3
        managers = [sequence.manager for sequence in sequences.values()]
        assert all(manager.drafter.length == manager.session.base for manager in managers)

    for name, number in actions:
        if name == "begin" and len(target.open) < 3:
            target.begin()
        elif name == "end" and target.open:
            target.end(number % len(target.open))
        elif name == "remind" and target.open:
            target.remind(number % len(target.open))
        elif name == "hear" and target.said:
            hear(target.said[-1 - number % len(target.said)])
        elif name == "verdict":
            draft.say(Verdict(number, 1, 0, len(PROMPT), ANSWER[:1]))
    for index, _ in enumerate(target.open):
        target.remind(index)
        hear(target.said[-1])
    assert not target.open or set(sequences) == set(target.open)
