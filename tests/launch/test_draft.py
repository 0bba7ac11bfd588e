"""The rank that starts drafts: what the target hears of them from it, and which ends make it start another one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from amusd.child import Lives
from amusd.config import RunConfig
from amusd.errors import ConfigError, PeerFailedError
from amusd.runtime.supervisor import TARGET_GONE
from amusd.transport.base import Rendezvous
from launch import draft, nodes
from launch.devices import NCCL_SETTINGS
from launch.draft import run_draft_rank
from launch.job import Group, Job, Options
from launch.store import Place

GROUP = Group(command="generate", jobs=(Job(config=RunConfig(), run_directory=Path("/nowhere")),))


def place(*, is_away: bool) -> Place:
    return Place(rank=1, apart=is_away, address="127.0.0.1", port=1, is_by_itself=False, namespace="amusd")


class Told:
    """A store in which the target wants `num_wanted` drafts, has met each, and has not finished."""

    values: dict[str, Any]
    num_wanted: int
    has_met: bool

    def __init__(self, *_: object) -> None: ...

    def put(self, name: str, value: object) -> None:
        self.values[name] = value

    def get(self, _name: str, _timeout: float) -> str:
        return GROUP.to_text()

    def has(self, name: str) -> bool:
        return name.startswith("met/") and self.has_met

    def await_any(self, names: Sequence[str], _timeout: float | None) -> str:
        return names[-1]  # `dismissed`


class Drafts:
    """Ends with these codes, one draft after another."""

    codes: Sequence[int]
    started: list[int]
    pid, is_preparing, exit_code = 7, False, 0

    def __init__(self, *_: object, **__: object) -> None:
        self._has_met = False

    def prepare(self) -> None: ...

    def tell(self, incarnation: int, _rendezvous: Rendezvous) -> None:
        self.started.append(incarnation)
        self.exit_code = self.codes[min(incarnation, len(self.codes)) - 1]

    def ending(self, _timeout: float) -> str:
        return "it has ended"

    def met(self) -> None:
        self._has_met = True

    def start_failure(self) -> ConfigError | PeerFailedError | None:
        if self._has_met or self.exit_code not in (1, 2):
            return None
        return PeerFailedError("out of luck") if self.exit_code == 1 else ConfigError("out of models")

    def stop(self) -> None: ...


@pytest.fixture(autouse=True)
def _doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    def rendezvous(store: Told, incarnation: int, _timeout: float) -> Rendezvous | None:
        return Rendezvous("ipc:///nowhere", 1) if incarnation <= store.num_wanted else None

    for name in NCCL_SETTINGS:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
    Told.values, Told.num_wanted, Told.has_met, Drafts.started = {}, 9, True, []
    monkeypatch.setattr(nodes, "Store", Told)
    monkeypatch.setattr(draft, "DraftProcess", Drafts)
    monkeypatch.setattr(draft, "warm_lives", lambda: Lives([]))
    monkeypatch.setattr(draft, "await_rendezvous", rendezvous)
    monkeypatch.setattr(draft, "claim_hardware", lambda config, *_, **__: config)


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        (1, {"users_mistake": False, "line": "out of luck"}),
        (2, {"users_mistake": True, "line": "out of models"}),
    ],
)
def test_the_target_hears_why_a_first_draft_could_not_start(code: int, failure: dict[str, object]) -> None:
    Drafts.codes, Told.has_met = [code], False
    assert run_draft_rank(Options(), place(is_away=False)) == 0
    with pytest.raises((ConfigError, PeerFailedError)):  # nobody else says so there
        run_draft_rank(Options(), place(is_away=True))
    assert Drafts.started == [1, 1]
    assert Told.values["failure"] == failure


def test_one_that_had_met_the_target_is_followed_until_one_is_wanted_no_more(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Drafts.codes, Told.num_wanted = [-9, 1, 2, TARGET_GONE, -9], 5
    assert run_draft_rank(Options(), place(is_away=True)) == 0
    assert Drafts.started == [1, 2, 3, 4, 5]
    assert "failure" not in Told.values
    assert Told.values["draft_pid/5"] == 7
    assert "the target has finished, and so has this draft" in capsys.readouterr().err


def test_one_whose_link_has_ended_with_the_run_is_followed_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    Drafts.codes = [TARGET_GONE]
    monkeypatch.setattr(Told, "await_any", lambda _store, names, _timeout: names[0])
    assert run_draft_rank(Options(), place(is_away=False)) == 0
    assert Drafts.started == [1]
