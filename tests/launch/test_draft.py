"""The supervisor of the draft: which ends the target hears of from it, and which make it start another process."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from amusd.child.lives import Ended
from amusd.runtime.succession import MAX_RESTARTS
from launch import draft
from launch.draft import supervise_draft
from launch.job import Options
from launch.lifetime import PEER_FAILED
from launch.store import Place


def place(*, is_away: bool) -> Place:
    local = 1 if is_away else 2
    return Place(
        rank=1, world_size=2, local_world_size=local, address="127.0.0.1", port=1, hosts_store=False, namespace="amusd"
    )


class Told:
    """A store that nobody reads."""

    values: dict[str, Any]

    def __init__(self, *_: object) -> None: ...

    def put(self, name: str, value: object) -> None:
        self.values[name] = value


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    Told.values = {}
    monkeypatch.setattr(draft, "Store", Told)
    monkeypatch.setattr(draft, "_BACK_OFF_SECONDS", 0.0)
    return Told.values


def ends_with(monkeypatch: pytest.MonkeyPatch, *codes: int, said: str = "") -> list[int]:
    """Lives that end with these, one after another; returns the list of those that were started."""
    started: list[int] = []

    def live(_lives: object, incarnation: int, *, is_first: bool) -> Ended:
        assert is_first == (incarnation == 1 or not said)
        started.append(incarnation)
        return Ended(pid=7, code=codes[min(incarnation, len(codes)) - 1], said=said)

    monkeypatch.setattr(draft, "live", live)
    return started


@pytest.mark.parametrize(
    ("is_away", "code", "said", "line"),
    [
        (False, 1, "", "exit code 1, for the reason above"),
        (True, 1, "", None),
        (False, 1, "reported", None),
        (False, 2, "", None),
        (False, 0, "", None),
    ],
)
def test_the_target_hears_of_a_first_process_that_could_not_tell_it_itself(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], is_away: bool, code: int, said: str, line: str | None
) -> None:
    started = ends_with(monkeypatch, code, said=said)
    supervise_draft(Options(), place(is_away=is_away))
    assert started == [1]
    assert told == ({} if line is None else {"draft_failure": {"users_mistake": False, "line": line}})


@pytest.mark.parametrize("is_away", [False, True])
@pytest.mark.parametrize("code", [-9, -15, 128 + 15])
def test_one_that_is_killed_before_it_is_ready_is_followed_so_many_times_and_then_the_target_hears_of_it(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], is_away: bool, code: int
) -> None:
    started = ends_with(monkeypatch, code)
    supervise_draft(Options(), place(is_away=is_away))
    assert started == list(range(1, MAX_RESTARTS + 2))
    line = f"killed by signal {9 if code == -9 else 15}, as {MAX_RESTARTS} before it"
    assert told == {"draft_failure": {"users_mistake": False, "line": line}}


def test_one_whose_run_is_over_is_followed_by_none(monkeypatch: pytest.MonkeyPatch, told: dict[str, Any]) -> None:
    for code in (0, 128 + PEER_FAILED, -signal.SIGALRM):
        assert ends_with(monkeypatch, code, said="met") == []
        supervise_draft(Options(), place(is_away=False))
    assert told == {}


@pytest.mark.parametrize(("is_away", "code"), [(False, 0), (True, 1)])
def test_only_without_the_target_its_code_is_that_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, is_away: bool, code: int
) -> None:
    ends_with(monkeypatch, 1)
    assert supervise_draft(Options(), place(is_away=is_away)) == code


def test_one_that_had_met_the_target_is_followed_until_one_is_wanted_no_more(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    started = ends_with(monkeypatch, -9, 1, 3, 0, said="met")
    assert supervise_draft(Options(), place(is_away=False)) == 0
    assert started == [1, 2, 3, 4]
    assert told == {}
    assert "rank 1, pid 7) was killed by signal 9" in capsys.readouterr().err
