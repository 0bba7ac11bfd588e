"""The search for the next draft, on a clock that only the test moves."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from runtime.clocked import Clock, Link

from amusd.child import Ended
from amusd.errors import ConfigError, PeerLostError
from amusd.protocol.messages import Hello
from amusd.runtime import draft_restart, handshake
from amusd.runtime.draft_restart import BACK_OFF_SECONDS, FAREWELL_SECONDS, LOOK_SECONDS, MAX_RESTARTS, DraftRestart


class Source:
    pid = None

    def __init__(self) -> None:
        self.has_ended = False
        self.told: list[int] = []
        self.num_dismissed = 0

    def ending(self, _timeout: float, /) -> Ended | None:
        return Ended(7, -9) if self.has_ended else None

    def tell(self, incarnation: int, _address: str, _nonce: int) -> None:
        self.told.append(incarnation)
        self.has_ended = False

    def dismiss(self) -> None:
        self.num_dismissed += 1
        self.has_ended = True

    def stop(self) -> None:
        pass


class Search:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.source = Clock(), Source()
        self.links: list[Link] = []
        self.cuts_links = False
        time = SimpleNamespace(monotonic=lambda: self.clock.ns / 1e9, sleep=self.clock.pass_by)
        monkeypatch.setattr(draft_restart, "time", time)
        monkeypatch.setattr(handshake, "time", time)
        self.restart = DraftRestart(self.source, self._listen, 10.0)
        self.restart.start()
        self.links[0].inbox.append(hello(1))
        assert self.restart.first("") == (self.links.pop(), 1)
        self.source.told.clear()

    def _listen(self, _nonce: int) -> Link:
        self.links.append(Link(self.clock))
        self.links[-1].is_lost = self.cuts_links
        return self.links[-1]

    def lose(self) -> None:
        self.source.has_ended = True
        self.restart.lost("it was killed")

    def poll_until_told(self) -> float:
        start_ns, num_told = self.clock.ns, len(self.source.told)
        while len(self.source.told) == num_told:
            assert self.restart.poll() is None
            assert self.clock.ns - start_ns < 60e9
            self.clock.pass_by(LOOK_SECONDS / 10)
        return (self.clock.ns - start_ns) / 1e9


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Search:
    return Search(monkeypatch)


def hello(incarnation: int) -> Hello:
    return Hello(incarnation, "", ("test",))


def test_a_first_draft_that_is_lost_and_does_not_end_is_waited_for_until_the_start_is_to_be_over(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    search.cuts_links = True
    monkeypatch.setattr(search.source, "dismiss", lambda: None)
    again = DraftRestart(search.source, search._listen, 10.0)
    again.start()
    with pytest.raises(PeerLostError, match="has not ended within startup_timeout_seconds"):
        again.first("")
    assert search.clock.ns / 1e9 < 11.0


def test_a_draft_that_does_not_end_by_itself_is_dismissed(search: Search) -> None:
    search.restart.lost("it has said nothing")
    assert search.poll_until_told() == pytest.approx(FAREWELL_SECONDS, abs=2 * LOOK_SECONDS)
    search.lose()
    search.poll_until_told()
    search.clock.pass_by(2 * FAREWELL_SECONDS)
    assert search.restart.poll() is None
    assert search.source.num_dismissed == 1


@pytest.mark.parametrize("says", [(), (hello(7),)])
def test_a_replacement_that_hangs_before_its_hello_or_is_another_one_is_replaced(
    search: Search, says: Sequence[Hello]
) -> None:
    search.lose()
    search.poll_until_told()
    search.links[-1].inbox.extend(says)
    search.poll_until_told()
    assert search.source.num_dismissed == 1
    search.links[-1].inbox.append(hello(search.restart._told))
    assert search.restart.poll() == (search.links[-1], search.restart._told)


@pytest.mark.parametrize("step", ["dismiss", "ending", "listen", "tell", "on_met", "cut"])
def test_whatever_fails_on_the_way_to_the_next_draft_costs_that_draft_alone(
    search: Search, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_arguments: object) -> None:
        raise OSError("the disk is full\nhere")

    with monkeypatch.context() as patch:
        if step == "cut":
            search.cuts_links = True
        else:
            patch.setattr(search.restart if step in ("listen", "on_met") else search.source, step, fail)
        search.restart.lost("it says nothing") if step == "dismiss" else search.lose()
        search.clock.pass_by(FAREWELL_SECONDS)
        for _ in range(3):
            assert search.restart.poll() is None
            for link in search.links:
                link.inbox.append(hello(search.restart._told))
            search.clock.pass_by(LOOK_SECONDS)
    search.cuts_links = False
    assert search.restart.failure is None
    search.source.has_ended = True
    search.clock.pass_by(60.0)
    search.poll_until_told()
    search.links[-1].inbox.append(hello(search.restart._told))
    assert search.restart.poll() == (search.links[-1], search.restart._told)
    assert [link.is_closed for link in search.links] == [*[True] * (len(search.links) - 1), False]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_restart_without_descriptors_is_tried_again_until_there_are_some(
    search: Search, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(_nonce: int) -> None:
        try:
            raise OSError(number, "Too many open files")
        except OSError as error:
            raise ConfigError(f"cannot be had: {error}") from None

    with monkeypatch.context() as patch:
        patch.setattr(search.restart, "listen", fail)
        search.lose()
        for _ in range(4 * MAX_RESTARTS):
            assert search.restart.poll() is None
            search.clock.pass_by(1.0)
    assert search.restart.failure is None
    search.poll_until_told()
    search.links[-1].inbox.append(hello(search.restart._told))
    assert search.restart.poll() is not None


def test_each_restart_that_brings_no_candidate_is_waited_for_twice_as_long(search: Search) -> None:
    waits = []
    for _ in range(MAX_RESTARTS):
        search.lose()
        waits.append(search.poll_until_told())
        search.links[-1].inbox.append(hello(search.source.told[-1]))
        assert search.restart.poll() is not None
        search.clock.pass_by(LOOK_SECONDS)
    assert waits[0] < BACK_OFF_SECONDS
    assert all(
        BACK_OFF_SECONDS * 2**number <= wait <= BACK_OFF_SECONDS * 2**number + 2 * LOOK_SECONDS
        for number, wait in enumerate(waits[1:])
    )
    assert search.restart.failure is None
    search.lose()
    assert (
        search.restart.failure
        == f"{MAX_RESTARTS} restarts in a row brought no accepted candidate; at last: it was killed"
    )


@pytest.mark.parametrize("seconds", [0.0, draft_restart.STEADY_SECONDS])
def test_a_draft_that_was_of_use_or_up_for_long_is_worth_as_many_restarts_as_the_first(
    search: Search, seconds: float
) -> None:
    search.clock.pass_by(seconds)
    for _ in range(2 * MAX_RESTARTS):
        search.lose()
        assert search.poll_until_told() < BACK_OFF_SECONDS
        search.links[-1].inbox.append(hello(search.source.told[-1]))
        assert search.restart.poll() is not None
        if not seconds:
            search.restart.accepted()
        search.clock.pass_by(seconds)
        search.clock.pass_by(LOOK_SECONDS)
    assert search.restart.failure is None
