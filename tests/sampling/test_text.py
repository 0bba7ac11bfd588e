"""Stopping and the streamed text, as the pure functions that they are."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from amusd.sampling.stopping import StopChecker, cut_at_stop
from amusd.types import FinishReason

PIECES = st.lists(st.text("ab", max_size=3), min_size=1, max_size=8)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple)


@given(pieces=PIECES, stop=STOPS, cap=st.integers(1, 9), blocks=st.lists(st.integers(1, 4), min_size=9, max_size=9))
def test_blocks_do_not_matter_and_the_text_is_cut_before_the_first_stop(
    pieces: list[str], stop: tuple[str, ...], cap: int, blocks: list[int]
) -> None:
    """However tokens are grouped, the answer ends at the first token that completes a stop string, or at the cap."""
    checker = StopChecker((), stop, cap, pieces.__getitem__)
    kept: list[int] = []
    reason: FinishReason | None = None
    rest = list(range(len(pieces)))
    for size in blocks:
        block, rest = rest[:size], rest[size:]
        if not block or reason is not None:
            break
        texts, reason = checker.push(block)
        kept += block[: len(texts)]
    texts = ["".join(pieces[: n + 1]) for n in range(len(pieces))]
    stopped = next((n + 1 for n, text in enumerate(texts) if any(string in text for string in stop)), len(pieces) + 1)
    end = min(stopped, cap, len(pieces))
    assert kept == list(range(end))
    if end == stopped:
        assert reason == "stop"
    elif end == cap:
        assert reason == "length"
    else:
        assert reason is None


@given(pieces=PIECES, stop=STOPS)
def test_what_is_shown_is_the_text_and_never_part_of_a_stop_string(pieces: list[str], stop: tuple[str, ...]) -> None:
    shown = whole = ""
    checker = StopChecker((), stop, len(pieces), pieces.__getitem__)
    for token_id, piece in enumerate(pieces):
        whole += piece
        [text], reason = checker.push([token_id])
        shown += text
        assert cut_at_stop(whole, stop).startswith(shown)
        if reason is not None:
            assert shown == cut_at_stop(whole, stop)
            return


def test_end_of_sequence_wins_over_stop_and_stop_over_length() -> None:
    push = ["x", "stop"].__getitem__
    assert StopChecker((1,), ("stop",), 2, push).push((0, 1))[1] == "eos"
    assert StopChecker((), ("stop",), 2, push).push((0, 1))[1] == "stop"
    assert StopChecker((), (), 2, push).push((0, 1))[1] == "length"


def test_a_token_costs_as_little_with_a_long_stop_string_as_with_a_short_one() -> None:
    looks: list[str] = []

    class Watched(str):
        __slots__ = ()

        def __getitem__(self, key: Any) -> str:
            looks.append("part")
            return super().__getitem__(key)

        def startswith(self, *arguments: Any) -> bool:
            looks.append("beginning")
            return super().startswith(*arguments)

    checker = StopChecker((), (Watched("b" + "a" * 1000),), 9, ["xyz", "ba", "ac"].__getitem__)
    assert checker.push([0, 1, 2]) == (["xyz", "", "baac"], None)
    assert len(looks) < 20


def test_the_earliest_stop_string_cuts() -> None:
    assert cut_at_stop("x b a", ("a", "b")) == "x "


def test_the_last_token_shows_what_is_left_of_the_text() -> None:
    checker = StopChecker((), (), 2, ("a", "").__getitem__, flush_text=lambda: "\ufffd")
    assert checker.push([0, 1]) == (["a", "\ufffd"], "length")
