"""What the survival experiment reads off the target's events, and what it calls a problem."""

from __future__ import annotations

from tracing.runs import made

from amusd.tracing.events import Event
from experiments.survival import run as survival

MS = 1_000_000


def passed(start: float, end: float, *, tokens: int = 1, accepted: int = 0, sequence: int = 1) -> Event:
    return made("target_pass", int(start * MS), int(end * MS), sequence, num_tokens=tokens, num_accepted=accepted)


def at(name: str, ms: float) -> Event:
    return made(name, int(ms * MS), int(ms * MS))


STORY = [
    passed(0, 40, tokens=3, accepted=2),
    passed(41, 81, tokens=2, accepted=1),
    at("draft_lost", 90),
    passed(101, 141),
    passed(142, 181),
    passed(301, 341, sequence=2),
    passed(343, 383, sequence=2),
    at("draft_back", 390),
    passed(391, 431, sequence=2),
    passed(432, 472, tokens=3, accepted=2, sequence=2),
]


def test_a_cycle_is_read_off_the_events() -> None:
    cycle = survival.cycle_of(STORY, 60 * MS)
    assert cycle == {
        "pause_ms": 20.0,
        "notice_ms": 30.0,
        "away_ms": 300.0,
        "attach_ms": 82.0,
        "alone_ms_per_token": (40 + 42 + 48 - 8) / 3,
    }


def test_a_cycle_ends_with_the_first_accepted_candidate() -> None:
    assert all(survival.cycle_of(STORY[:number], 60 * MS) is None for number in range(len(STORY)))


def test_a_wrong_token_and_anything_left_is_a_problem() -> None:
    fine = {
        "num_answers": 3, "num_exact": 3, "held_before": {"sockets": 2}, "held_after": {"sockets": 2}, "left": {"a": 0},
    }  # fmt: skip
    assert survival.problems_of(fine) == []
    for spoilt in ({"num_exact": 2}, {"held_after": {"sockets": 3}}, {"left": {"a": 1}}):
        assert len(survival.problems_of({**fine, **spoilt})) == 1
