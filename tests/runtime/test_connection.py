"""The search for the next draft, on a clock that only the test moves."""

from __future__ import annotations

import errno
from unittest.mock import Mock

import pytest
from memory_link import memory_pair, of_another_version
from runtime.clocked import Clock, Link, Source

from amusd.errors import ConfigError, PeerError, PeerLostError
from amusd.protocol.messages import PROTOCOL_VERSION, DraftHello, Failed, Message, Shutdown, TargetHello
from amusd.runtime.connection import FAREWELL_SECONDS, LOOK_SECONDS, Connection
from amusd.runtime.hello import BUSY, failure_report
from amusd.runtime.patience import BACK_OFF_SECONDS, MAX_RESTARTS, STEADY_SECONDS

TIMEOUT_SECONDS = 10.0


class Search:
    def __init__(self) -> None:
        self.clock = Clock()
        self.source = Source(self.clock)
        self.found = self.new()
        self.found.await_first("")
        self.source.num_started = 0

    def new(self) -> Connection:
        return Connection(
            source=self.source,
            startup_timeout_seconds=TIMEOUT_SECONDS,
            clock=self.clock,
        )

    def lose(self, *, has_ended: bool = True) -> None:
        self.source.has_ended = has_ended
        self.found.lose("it was killed")

    def look(self, until: str) -> float:
        """Look until a draft is there or one is `started`; returns how long that took."""
        start_ns, num_started = self.clock.ns, self.source.num_started
        while not self.found.find_next():
            assert self.clock.ns - start_ns < 60e9
            if until == "started" and self.source.num_started > num_started:
                break
            self.clock.pass_by(LOOK_SECONDS / 10)
        return (self.clock.ns - start_ns) / 1e9


@pytest.fixture
def search() -> Search:
    return Search()


def test_a_first_draft_that_is_lost_and_does_not_end_is_waited_for_until_the_start_is_to_be_over(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    search.source.cuts_links = True
    monkeypatch.setattr(search.source, "drop", lambda: None)
    with pytest.raises(PeerLostError, match=r"within startup_timeout_seconds$"):
        search.new().await_first("")
    assert search.clock.ns / 1e9 < TIMEOUT_SECONDS + 1.0


@pytest.mark.parametrize("what", ["is_deaf", "answers"])
def test_a_first_draft_that_does_not_come_or_answer_is_waited_for_no_longer_than_the_start_may_take(
    search: Search, what: str
) -> None:
    setattr(search.source, what, what == "is_deaf")
    search.source.process = None
    with pytest.raises(PeerLostError, match=r"no hello .* within startup_timeout_seconds; is its server at work"):
        search.new().await_first("")
    assert TIMEOUT_SECONDS <= search.clock.ns / 1e9 < TIMEOUT_SECONDS + 1.0


def test_a_draft_that_does_not_end_by_itself_is_dropped(search: Search) -> None:
    search.lose(has_ended=False)
    assert search.look("started") == pytest.approx(FAREWELL_SECONDS, abs=2 * LOOK_SECONDS)
    search.lose()
    search.look("there")
    search.clock.pass_by(2 * FAREWELL_SECONDS)
    assert not search.found.find_next()
    assert search.source.num_dropped == 1


@pytest.mark.parametrize("says", [(), (DraftHello(77, "", (), (), 1),), (Shutdown(),), (BUSY,)])
def test_a_replacement_that_hangs_before_its_hello_or_says_something_else_is_replaced(
    search: Search, says: tuple[Message, ...]
) -> None:
    search.source.answers = False
    search.lose()
    search.look("started")
    assert not search.found.find_next()
    search.source.links[-1].inbox.extend(says)
    search.source.answers = True
    search.look("there")
    assert search.source.num_dropped == 1
    assert search.found.link is search.source.links[-1]


@pytest.mark.parametrize("step", ["drop", "ended", "start", "connect", "on_met", "cut"])
def test_whatever_fails_on_the_way_to_the_next_draft_costs_that_draft_alone(
    search: Search, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_arguments: object) -> None:
        raise OSError("the disk is full\nhere")

    with monkeypatch.context() as patch:
        if step == "cut":
            search.source.cuts_links = True
        else:
            patch.setattr(search.found if step == "on_met" else search.source, step, fail)
        search.lose(has_ended=step != "drop")
        search.clock.pass_by(FAREWELL_SECONDS)
        for _ in range(3):
            assert not search.found.find_next()
            search.clock.pass_by(LOOK_SECONDS)
    search.source.cuts_links = False
    search.source.has_ended = True
    search.clock.pass_by(60.0)
    search.look("there")
    assert search.found.link is search.source.links[-1]
    assert [link.is_closed for link in search.source.links] == [*[True] * (len(search.source.links) - 1), False]


def test_a_draft_is_used_though_a_full_disk_cannot_hold_its_process_id(
    search: Search, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ConfigError("workers.json: cannot be written (No space left on device)")

    search.found.on_met = fail
    search.lose()
    search.look("there")
    assert search.found.link is search.source.links[-1]
    assert caplog.messages == ["workers.json: cannot be written (No space left on device)"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_restart_without_descriptors_is_tried_again_until_there_are_some(
    search: Search, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail() -> None:
        try:
            raise OSError(number, "Too many open files")
        except OSError as error:
            raise ConfigError(f"cannot be had: {error}") from None

    with monkeypatch.context() as patch:
        patch.setattr(search.source, "connect", fail)
        search.lose()
        for _ in range(MAX_RESTARTS + 2):
            assert not search.found.find_next()
            search.clock.pass_by(1.0)
    search.look("there")
    assert len(search.found.losses) == 1


def test_each_restart_that_brings_no_candidate_is_waited_for_twice_as_long(search: Search) -> None:
    waits = []
    for _ in range(MAX_RESTARTS):
        search.lose()
        waits.append(search.look("there"))
    assert waits[0] < BACK_OFF_SECONDS
    assert all(
        BACK_OFF_SECONDS * 2**number <= wait <= BACK_OFF_SECONDS * 2**number + 2 * LOOK_SECONDS
        for number, wait in enumerate(waits[1:])
    )
    assert search.found.failure is None
    search.lose()
    expected = f"{MAX_RESTARTS} restarts in a row brought no accepted candidate; at last: it was killed"
    assert search.found.failure == expected


@pytest.mark.parametrize("is_of_use", [True, False])
def test_a_draft_with_accepted_candidates_or_long_work_has_as_many_restarts_as_the_first(
    search: Search, is_of_use: bool
) -> None:
    for _ in range(2 * MAX_RESTARTS):
        search.lose()
        assert search.look("there") < BACK_OFF_SECONDS
        if is_of_use:
            search.found.on_accepted()
        search.clock.pass_by(LOOK_SECONDS if is_of_use else STEADY_SECONDS)
    assert search.found.failure is None


def test_a_server_that_is_away_is_tried_at_longer_intervals_for_ever_and_counts_when_it_loses_a_session(
    search: Search,
) -> None:
    search.source.process, search.source.cuts_links = None, True
    search.lose()
    for _ in range(4 * MAX_RESTARTS):
        assert search.found.presence == "away"
        search.look("started")
    num_started, seconds = search.source.num_started, search.clock.ns / 1e9
    assert seconds > 2 * MAX_RESTARTS * BACK_OFF_SECONDS * 2 ** (MAX_RESTARTS - 2)
    search.source.cuts_links = False
    search.look("there")
    for _ in range(MAX_RESTARTS):
        assert search.found.failure is None
        search.lose()
        if search.found.failure is None:
            search.look("there")
    assert "no accepted candidate" in str(search.found.failure)
    assert num_started > MAX_RESTARTS


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        (failure_report(ConfigError("model /m: quantized with AWQ")), ConfigError, r"^model /m: quantized with AWQ$"),
        (failure_report(ConfigError("model /\udcff: no such folder")), ConfigError, r"^model /\?: no such folder$"),
        (failure_report(MemoryError("a bug")), PeerError, r"MemoryError: a bug$"),
        (Failed("Error", "no\n\tspace\x1b[2J\x07left"), PeerError, r"no\n\tspace\?\[2J\?left"),
        (BUSY, ConfigError, "^drafter.address=memory://: the draft serves another target; it serves one at a time$"),
        (DraftHello(1, "a" * 64, ("eagle",), (), 7), ConfigError, "^drafter=eagle: its tokenizer differs"),
        (DraftHello(1, "", ("eagle",), (), 7), ConfigError, "^drafter=ngram: the draft has eagle$"),
    ],
)
def test_a_first_draft_that_says_why_it_cannot_serve_is_believed_at_once(
    search: Search, said: Message, kind: type, text: str
) -> None:
    search.source.answers = False
    connect = search.source.connect
    search.source.connect = lambda: said_by(connect(), said)  # type: ignore[method-assign]
    with pytest.raises(kind, match=text) as caught:
        search.new().await_first("b" * 64, ["ngram"])
    assert type(caught.value) is kind
    assert search.clock.ns == 0


def test_a_handshake_that_fails_is_a_refusal_of_a_first_target_and_a_broken_network_later(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    search.source.process = None
    search.source.answers = False
    monkeypatch.setattr(Link, "refusal", "no key")
    with pytest.raises(ConfigError, match="the draft refuses this target: no key"):
        search.new().await_first("")
    search.lose()
    assert not search.found.find_next()
    monkeypatch.setattr(Link, "refusal", None)
    search.source.answers = True
    search.look("there")
    assert search.found.num_restarts == 1


@pytest.mark.parametrize(("text", "reason"), [("no paper\nat line 3", "no paper"), (" \n", "it gave no reason")])
def test_a_draft_that_cannot_be_sent_to_is_lost_for_the_reason_that_it_gave_at_last(
    search: Search, monkeypatch: pytest.MonkeyPatch, text: str, reason: str
) -> None:
    link = search.source.links[-1]
    link.inbox += [DraftHello(1, "", (), (), 7), Failed("Error", text)]
    monkeypatch.setattr(link, "send", Mock(side_effect=PeerLostError("the peer closed the link")))
    assert not search.found.send(Shutdown())
    assert search.found.losses == [reason]


def test_a_next_draft_that_does_not_fit_the_target_is_refused_for_good(search: Search) -> None:
    search.source.answers = False
    search.lose()
    search.look("started")
    link = search.source.links[-1]
    link.inbox.append(DraftHello(2, "a" * 64, ("test",), (), 7))
    assert not search.found.find_next()
    assert str(search.found.failure).startswith("the next draft is refused: drafter=test: its tokenizer differs")
    assert link.is_closed


def said_by(link: Link, message: Message) -> Link:
    link.inbox.append(message)
    return link


def test_a_peer_of_another_version_is_refused_at_once(search: Search) -> None:
    here, there = memory_pair()
    there.send_frame(of_another_version(TargetHello(1, "", None)))
    search.source.connect = lambda: here  # type: ignore[method-assign]
    with pytest.raises(
        ConfigError, match=f"protocol version 11, this side {PROTOCOL_VERSION}: install one amusd at both ends"
    ):
        search.new().await_first("")
