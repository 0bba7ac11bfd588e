"""The messages of a target to its draft and its waits for it, on a clock that only the test moves."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from protocol.sessions import hash_of
from runtime.clocked import Clock, Link, Source
from runtime.pair import decode
from table_model import TableModel

from amusd.policies.base import Policy, TargetView, Wait
from amusd.policies.schedules import ContinuousPolicy, SynchronousPolicy
from amusd.protocol.messages import Candidate, Close, DraftHello, Features, Message, Open, Progress, Refused, Verdict
from amusd.runtime.connection import Connection
from amusd.runtime.draft_client import COUNTS_SECONDS, DraftClient
from amusd.runtime.patience import MAX_NONSENSE, MAX_SIGN_SECONDS, SILENCES, TAKE_IN_SECONDS
from amusd.runtime.target_sequence import TargetSequence
from amusd.runtime.target_worker import TargetWorker
from amusd.runtime.verifier import Request
from amusd.sampling.stopping import StopChecker
from amusd.tracing.recorder import Recorder

VOCAB_SIZE = 50
PROMPT = (3, 1, 4)
SILENCE = 0.3
PASS_SECONDS = 0.01


class SlowModel(TableModel):
    clock: Clock

    def run(self, *args: Any, **options: Any) -> Any:
        self.clock.pass_by(PASS_SECONDS)
        return super().run(*args, **options)


class Target:
    def __init__(self, *, round_trip_seconds: float = 0.0) -> None:
        self.clock = Clock()
        self.link, self.next = Link(self.clock), Source(self.clock)
        recorder = Recorder("target", clock=self.clock)
        self.next.process = None  # there is nothing whose end would be waited for
        source: Any = self.next
        self.connection = Connection(self.link, 1, source, clock=self.clock)
        self.client = DraftClient(recorder, self.connection, round_trip_seconds)
        model = SlowModel(VOCAB_SIZE, seed=7, max_length=2000)
        model.clock = self.clock
        self.worker = TargetWorker(model, recorder, self.client, max_num_seqs=4)

    def request(self, num_tokens: int, reference: tuple[int, ...] = ()) -> tuple[Request, StopChecker]:
        request = Request(
            prompt=PROMPT,
            max_length=len(PROMPT) + num_tokens,
            # waits for a full block in each pass
            policy=SynchronousPolicy(max_lookahead=4, tokens_per_message=4, timeout_seconds=1.0),
            drafter="test",
            max_silence_seconds=SILENCE,
            reference=reference,
        )
        return request, StopChecker((), (), num_tokens, str)

    def open(self, num_tokens: int = 20) -> TargetSequence:
        return self.worker.admit(*self.request(num_tokens))


def candidate(sequence: TargetSequence, token_ids: Sequence[int], *, incarnation: int = 1) -> Candidate:
    return chain(sequence.sequence_id, sequence.session.committed, token_ids, incarnation)


def chain(sequence_id: int, committed: Sequence[int], token_ids: Sequence[int], incarnation: int = 1) -> Candidate:
    numbers, prefix = tuple(range(len(token_ids))), (len(committed), hash_of(committed))
    return Candidate(sequence_id, incarnation, *prefix, 1, numbers, tuple(token_ids), (), more=True)


WAITS = st.lists(st.floats(0.001, 0.2), max_size=12)


@given(before=WAITS, after=WAITS)
def test_waits_add_up_from_the_last_word_on(before: list[float], after: list[float]) -> None:
    target = Target()
    sequence = target.open()
    for seconds in before:
        target.client.take(seconds)
    target.link.inbox.append(candidate(sequence, (1,)))
    assert target.client.take(1.0)
    start_ns = target.clock.ns
    for wanted in after:  # as the worker does: never longer than may be
        target.client.take(min(wanted, target.client.patience_seconds))
    waited = (target.clock.ns - start_ns) / 1e9
    assert waited <= SILENCE + 1e-6
    assert target.client.has_draft(sequence) == (sum(after) < SILENCE - 1e-6)


def test_what_the_link_takes_is_no_silence() -> None:
    target = Target(round_trip_seconds=0.2)
    target.open()
    assert target.client.patience_seconds == pytest.approx(SILENCE + 0.2)


def test_a_silent_draft_costs_one_pause_in_the_whole_answer() -> None:
    target = Target()
    assert len(list(decode(target.worker, *target.request(200)))) == 200
    waited = target.clock.ns / 1e9 - 200 * PASS_SECONDS
    assert 0 < waited <= SILENCE + 1e-6  # nor is the end waited for


def test_a_silent_draft_that_nothing_replaces_is_told_again_at_longer_and_longer_intervals() -> None:
    target = Target()
    target.connection.source = None
    for _ in decode(target.worker, *target.request(1000)):
        pass
    told = [at for at, message in target.link.sent if isinstance(message, Verdict)]
    alone = [at for at in told if at > SILENCE]
    gaps = [later - earlier for earlier, later in itertools.pairwise(alone)]
    assert len(alone) >= 3
    assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(gaps))
    openings = target.link.messages(Open)
    assert len(openings) == 1 + len(alone)  # it never answered, so it may not have got the opening
    assert next(opening.token_ids for opening in openings) == PROMPT
    assert len(openings[-1].token_ids) > len(openings[0].token_ids)


def test_a_draft_that_has_answered_is_told_the_verdict_alone() -> None:
    target = Target()
    target.link.inbox.append(chain(1, PROMPT, (1,)))
    for _ in decode(target.worker, *target.request(300)):
        pass
    assert len(target.link.messages(Open)) == 1
    assert len(target.link.messages(Verdict)) > 2


@pytest.mark.parametrize("nonsense", [DraftHello(1, "", (), (), 7), chain(1, PROMPT, (VOCAB_SIZE,))])
def test_a_draft_that_talks_nonsense_is_lost(nonsense: Message) -> None:
    target = Target()
    target.open()
    target.link.inbox += [nonsense] * MAX_NONSENSE
    target.client.drain()
    assert target.connection.losses == [f"it sent {MAX_NONSENSE} messages in a row that the protocol forbids"]


def test_the_next_draft_is_not_silent_and_has_said_no_nonsense() -> None:
    target = Target()
    sequence = target.open()
    target.client.take(SILENCE)
    assert not target.client.has_draft(sequence)
    nonsense = DraftHello(1, "", (), (), 7)
    target.link.inbox += [nonsense] * (MAX_NONSENSE - 1)
    target.client.drain()
    assert target.connection.link is not None
    target.link.is_lost = True
    target.client.take(0.0)
    assert (target.connection.link, target.link.is_closed, sequence.session.attached) == (None, True, False)
    assert (target.connection.presence, Connection().presence) == ("away", "none")
    assert target.client.look_for_next()
    assert target.client.has_draft(sequence)
    target.next.links[-1].inbox.append(nonsense)
    target.client.drain()
    assert target.connection.link is not None
    assert target.connection.losses == ["the link is cut"]


def test_an_incarnation_counts_as_useful_if_a_candidate_was_accepted_before_it_was_lost() -> None:
    right = next(decode(Target().worker, *Target().request(1))).token_id
    for token_id, number in (((right + 1) % VOCAB_SIZE, 0), (right, 1)):
        target = Target()
        target.link.inbox.append(chain(1, PROMPT, (token_id,)))
        target.connection._restarts._num_fruitless = 3
        next(decode(target.worker, *target.request(20)))
        assert target.connection._restarts._num_fruitless == (0 if number else 3)
    target.connection.lose("its process ended")
    target.connection.on_accepted()
    assert target.connection._restarts._num_fruitless == 1


def without_waits(target: Target, num_tokens: int) -> TargetSequence:
    request, stop = target.request(num_tokens)
    policy = ContinuousPolicy(max_lookahead=4, tokens_per_message=1, min_candidates=0, max_wait_passes=1.0)
    sequence = target.worker.admit(replace(request, policy=policy), stop)
    while not sequence.is_over:
        target.worker.step()
    return sequence


def test_a_draft_that_does_not_answer_is_silent_though_nothing_waits_for_it() -> None:
    target = Target()
    metrics = without_waits(target, 100).metrics  # a second
    assert target.connection.presence == "silent"
    assert metrics.num_tokens_alone == pytest.approx(100 - SILENCE / PASS_SECONDS, abs=2)
    assert target.connection.losses == []
    late = target.open()
    target.link.inbox.append(candidate(late, (1,)))
    target.client.drain()
    assert target.connection.presence == "present"
    assert target.client.has_draft(late)


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_draft_that_goes_on_saying_nothing_is_replaced_in_one_line_after_time_for_prompts(
    has_begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    target = Target()
    sequence = target.open(1000)
    if has_begun:
        target.link.inbox.append(candidate(sequence, (1,)))
        target.client.drain()
        target.client.send_verdict(sequence)
    seconds = SILENCES * SILENCE + (0.0 if has_begun else TAKE_IN_SECONDS * len(PROMPT))
    for elapsed in (SILENCE + 0.001, seconds - SILENCE - 0.01):
        target.clock.pass_by(elapsed)
        target.client.drain()
    assert target.connection.losses == []
    target.clock.pass_by(0.02)
    target.client.drain()
    assert target.connection.losses == [f"it has said nothing for {seconds:.1f} s"]
    assert caplog.messages == [f"the draft is replaced: it has said nothing for {seconds:.1f} s"]
    assert target.client.look_for_next()
    assert target.client.has_draft(sequence)


def test_a_draft_that_was_stopped_together_with_its_target_has_time_to_answer() -> None:
    target = Target()
    sequence = target.open(1000)
    target.link.inbox.append(candidate(sequence, (1,)))
    target.client.drain()
    target.client.send_verdict(sequence)
    target.clock.pass_by(3600.0)
    for _ in range(5):
        target.client.drain()
        target.clock.pass_by(SILENCE)
    assert target.connection.losses == []
    target.clock.pass_by(SILENCES * SILENCE)
    target.client.drain()
    assert target.connection.losses == ["it has said nothing for 4.8 s"]


@pytest.mark.parametrize("load_seconds", [0.0, 2.0, 5.0, 8.0])
def test_a_draft_killed_at_any_moment_is_lost_once_however_long_the_next_one_loads(
    load_seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    target, chance = Target(), random.Random(f"{load_seconds}")
    target.next.load_seconds = load_seconds
    sequence = target.open(1000)
    for number in range(1, 31):
        if chance.random() < 0.5:
            target.client.send_verdict(sequence)
        target.clock.pass_by(chance.uniform(0, SILENCES * SILENCE))
        target.connection.link.is_lost = True  # type: ignore[union-attr]
        target.client.take(0.0)
        for _ in range(round(load_seconds / SILENCE)):  # passes without a draft
            assert not target.client.look_for_next()
            target.clock.pass_by(SILENCE)
            target.client.drain()
            target.client.send_verdict(sequence)
            target.connection.count_nonsense()
            target.connection.lose("it is gone")
        target.clock.pass_by(SILENCE)
        assert target.client.look_for_next()
        target.connection.on_accepted()  # else the target would give up after this many losses
        assert target.client.has_draft(sequence)
        assert target.connection.losses == ["the link is cut"] * number
    assert (target.connection.num_restarts, caplog.messages) == (30, [])


def test_a_draft_that_refuses_a_sequence_is_neither_silent_nor_replaced() -> None:
    class Refusing(Link):
        def send(self, message: Message) -> None:
            super().send(message)
            if isinstance(message, Open):
                self.inbox.append(Refused(message.sequence_id))

    target = Target()
    target.connection.link = Refusing(target.clock)
    sequence = without_waits(target, 1000)
    assert (target.connection.presence, target.connection.losses, sequence.metrics.draft) == ("present", [], None)


def test_the_step_of_the_last_token_ends_before_the_drafts_counts_arrive() -> None:
    target = Target()
    target.link.inbox.append(chain(1, PROMPT, (1, 2, 3, 4)))
    sequence = target.open(1)
    target.worker.step()
    assert (len(sequence.tokens), sequence.is_over) == (1, False)
    assert target.clock.ns / 1e9 == PASS_SECONDS + COUNTS_SECONDS
    while not sequence.is_over:
        target.worker.step()
    assert target.clock.ns / 1e9 == pytest.approx(PASS_SECONDS + SILENCE, abs=0.011)


def test_a_draft_that_only_says_that_it_works_is_replaced() -> None:
    class Busy(Link):
        def receive(self, timeout: float) -> Message | None:
            message = super().receive(min(timeout, 0.1))
            return Progress(1, 0, 0, 0, 1) if message is None and timeout else message

    target = Target()
    target.connection.link = busy = Busy(target.clock)  # type: ignore[assignment]
    busy.inbox.append(chain(1, PROMPT, (1,)))
    assert len(list(decode(target.worker, *target.request(400)))) == 400
    assert target.clock.ns / 1e9 < MAX_SIGN_SECONDS + 3 * SILENCE + 400 * PASS_SECONDS
    assert len(target.connection.losses) == 1


def test_counts_that_are_not_final_are_no_counts() -> None:
    """Counts that are not final may show fewer drafted tokens than accepted ones."""
    target = Target()
    sequence = target.open(1)
    target.link.inbox += [chain(1, PROMPT, (1, 2, 3, 4)), Progress(1, 3, 0, 0, 1)]
    while not sequence.is_over:
        target.worker.step()
    assert target.link.messages(Close)
    assert sequence.metrics.draft is None


def test_a_draft_that_joins_late_is_told_the_rest_of_a_known_answer() -> None:
    target = Target()
    plain = [token.token_id for token in decode(Target().worker, *target.request(30))]
    answer = decode(target.worker, *target.request(30, tuple(plain)))
    for _ in range(5):
        next(answer)
    target.link.is_lost = True
    for _ in answer:
        pass
    first, second = target.link.messages(Open)[0], target.next.links[-1].messages(Open)[0]
    assert first.reference == tuple(plain)
    assert (*second.token_ids, *second.reference) == (*PROMPT, *plain)
    assert len(second.reference) < len(plain)


def test_what_comes_for_one_sequence_changes_no_other() -> None:
    target = Target()
    first, second = target.open(), target.open()
    target.link.inbox += [candidate(second, (1, 2)), candidate(first, (3,), incarnation=9)]
    target.client.drain()
    assert (first.session.num_candidates, second.session.num_candidates) == (0, 2)
    assert (first.metrics.num_stale_candidates, second.metrics.num_stale_candidates) == (1, 0)
    target.link.inbox.append(Progress(first.sequence_id, 0, 0, 0, 1))
    target.client.close(first)
    assert not first.is_over
    target.client.drain()
    assert first.is_over
    assert [message.sequence_id for message in target.link.messages(Close)] == [first.sequence_id]
    assert [message.not_over for message in target.link.messages(Open)] == [(1, 2), (1, 2, 3)]
    assert [message.not_over for message in target.link.messages(Close)] == [(2, 3)]
    assert (first.metrics.draft is not None, second.metrics.draft) == (True, None)
    assert second.session.attached
    target.link.is_lost = True
    target.client.take(0.0)
    assert (first.metrics.num_draft_losses, second.metrics.num_draft_losses) == (0, 1)


def test_a_draft_that_was_replaced_has_not_failed_also_when_all_is_over() -> None:
    target = Target()
    target.connection.lose("it was killed")
    assert target.client.look_for_next()
    for _ in range(2):
        target.connection.shut_down()
        assert (target.connection.presence, target.connection.failure) == ("none", None)


def test_the_end_frees_the_graphs_also_where_an_answer_is_kept() -> None:
    target = Target()
    kept, graphs = target.open(), Mock()
    for cache in (kept.cache, *target.worker._free_caches):
        cache.captured = graphs
    is_alive = weakref.ref(graphs)
    del graphs, cache
    target.worker.shut_down()
    assert is_alive() is None


def test_a_draft_is_back_only_where_it_was_lost() -> None:
    target = Target()
    first = target.open()
    target.next.load_seconds = 1.0
    target.connection.lose("it was killed")
    second = target.open()
    target.clock.pass_by(1.0)
    assert target.client.look_for_next()
    assert first.session.attached
    assert second.session.attached
    assert (first.metrics.num_draft_restarts, second.metrics.num_draft_restarts) == (1, 0)


def test_a_draft_that_is_lost_amid_the_openings_is_back_for_those_alone_that_were_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = Target()
    sequences = target.open(), target.open()
    target.connection.lose("it was killed")
    connect = target.next.connect

    def connect_for_one_opening() -> Any:
        link = connect()
        send = link.send

        def send_until_opening(message: Message) -> None:
            send(message)
            link.is_lost = isinstance(message, Open)

        link.send = send_until_opening
        return link

    with monkeypatch.context() as patch:
        patch.setattr(target.next, "connect", connect_for_one_opening)
        assert not target.client.look_for_next()
    assert [sequence.metrics.num_draft_restarts for sequence in sequences] == [1, 0]
    target.clock.pass_by(1.0)
    assert target.client.look_for_next()
    assert [sequence.metrics.num_draft_restarts for sequence in sequences] == [2, 1]


def test_a_pause_of_the_reader_is_no_slowness_of_the_pair() -> None:
    """A pause that counted would turn drafting off, since plain decoding would look faster."""
    target = Target()
    request, stop = target.request(20)
    policy = ContinuousPolicy(max_lookahead=4, tokens_per_message=1, min_candidates=0, max_wait_passes=1.0)
    sequence = target.worker.admit(replace(request, policy=policy, drafter=None), stop)
    for number in range(10):
        target.worker.step()
        target.clock.pass_by(60.0 if number == 5 else 0.0)
    assert sequence.view.tokens_per_second == pytest.approx(1 / PASS_SECONDS, rel=0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hesitant(Policy):
    def decide(self, _view: TargetView) -> Wait:
        return Wait(0.0)


def test_a_wait_for_no_time_is_none() -> None:
    target = Target()
    request, stop = target.request(3)
    assert len(list(decode(target.worker, replace(request, policy=Hesitant()), stop))) == 3


def test_a_flood_of_large_messages_keeps_the_target_from_its_pass_for_a_moment_only() -> None:
    clock = Clock()
    num_read = 0

    class Flood(Link):
        def receive(self, timeout: float) -> Message:
            nonlocal num_read
            num_read += 1
            clock.pass_by(0.005)
            return Progress(1, 0, 0, 0, 1)

    client = DraftClient(Recorder("target", clock=clock), Connection(Flood(clock), 1))
    sequence: Any = Mock(at_draft=None, max_silence_seconds=1.0)
    client._sequences[1] = sequence
    client.drain()
    assert num_read == 4
    client.drain()
    assert num_read == 8


@pytest.mark.parametrize(("num_bytes", "num_sent"), [(47, 0), (48, 3)])
def test_features_wait_until_the_link_has_room_for_as_many_bytes_again(num_bytes: int, num_sent: int) -> None:
    target = Target()
    sequence = target.open()
    target.link.has_room = lambda needed: needed <= num_bytes  # type: ignore[method-assign]
    target.client.send_features(sequence, 0, torch.zeros(3, 4, dtype=torch.bfloat16))
    assert sum(message.end - message.start for message in target.link.messages(Features)) == num_sent
    assert target.client.features_due(sequence, 3) == range(num_sent, 3)
