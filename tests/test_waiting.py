"""A wait that a person sees: what for, how much longer, and what came of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from amusd import console

SECONDS = 60.0


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Callable[[], bool]]:
    """The lines, and a wait for the third of them."""
    lines: list[str] = []
    third = threading.Event()

    def tell(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            third.set()

    monkeypatch.setattr(console, "tell", tell)
    monkeypatch.setattr(console, "WAIT_LINE_SECONDS", 0.01)
    return lines, lambda: third.wait(SECONDS)


@pytest.mark.parametrize(
    ("seconds", "first", "again"),
    [(1000.0, "waiting for rain: 1000 s at most", " s left"), (None, "waiting for rain", " s so far")],
)
def test_a_wait_is_told_at_once_again_and_when_it_is_over(
    told: tuple[list[str], Callable[[], bool]], seconds: float | None, first: str, again: str
) -> None:
    lines, await_third = told
    with console.waiting_for("rain", seconds):
        assert await_third()
    assert lines[0] == first
    assert all(line.startswith("still waiting for rain: ") and line.endswith(again) for line in lines[1:-1])
    assert lines[-1].startswith("waited ")
    assert lines[-1].endswith(" s for rain: done")
    assert "waiting" not in [thread.name for thread in threading.enumerate()]
