"""Figures: lengths that mean what they say, the same file each time, and a page without them where nothing can draw."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reporting.drawings import box, fill, hints, marked, parse, points, texts

from amusd.errors import ConfigError
from amusd.reporting.columns import percent
from amusd.reporting.figures import WIDTH, bars, lines, stacked
from amusd.reporting.plots import canvas


@settings(max_examples=25)
@given(st.lists(st.floats(0.01, 50), min_size=1, max_size=6))
def test_bars_are_as_long_as_their_values_and_inside_the_figure(values: list[float]) -> None:
    root = parse(bars("b", [(str(value), value) for value in values], str, reference="plain"))
    drawn = [box(bar).right - box(bar).left for bar in marked(root, "bar")]
    longest, largest = max(drawn), max(values)
    assert longest < WIDTH
    for width, value in zip(drawn, values, strict=True):
        assert width == pytest.approx(longest * value / largest, abs=0.02)
    assert {str(value) for value in values} | {"plain"} <= set(texts(root))


def test_shares_fill_their_bar() -> None:
    root = parse(stacked("s", [("all", {"a": 0.25, "b": 0.75})]))
    first, second = map(box, marked(root, "share"))
    assert (first.left, first.right) == pytest.approx((0, WIDTH * 0.25))
    assert (second.left, second.right) == pytest.approx((WIDTH * 0.25, WIDTH))
    assert hints(marked(root, "share")) == ["a: 25 %", "b: 75 %"]
    assert texts(root)[-2:] == ["a", "b"]  # the legend


def test_a_line_skips_what_was_not_measured_and_keeps_its_look() -> None:
    root = parse(lines("l", ["1", "2", "3"], [("one", [0.0, None, 1.0], 4)], percent, top=1.0, axis="x"))
    (series,) = marked(root, "series")
    (first_x, first_y), (last_x, last_y) = points(series)
    assert first_y - last_y == pytest.approx(150)
    assert first_x < last_x <= WIDTH
    assert fill(marked(root, "point")[0]) == "var(--s4)"
    assert hints(marked(root, "point")) == ["one, x 1: 0 %", "one, x 3: 100 %"]
    assert {"0 %", "100 %", "one", "x", "1", "2", "3"} <= set(texts(root))


@settings(max_examples=25)
@given(st.floats(1e-6, 1e9))
def test_an_axis_reaches_its_highest_value_and_not_much_further(highest: float) -> None:
    root = parse(lines("l", ["1"], [("one", [highest], 0)], str, top=highest, axis="x"))
    ((_, y),) = points(marked(root, "point")[0])
    assert 14 <= y <= 14 + 0.05 * 156


def test_the_same_values_give_the_same_figure() -> None:
    drawn = {lines("l", ["1", "2"], [("one", [0.5, 1.0], 2)], percent, top=1.0, axis="x") for _ in range(2)}
    assert len(drawn) == 1


@pytest.mark.parametrize("name", ["$a$ and $b_", "日本語", "<b>&amp;</b>"])
def test_a_name_is_shown_as_it_is(name: str) -> None:
    assert name in texts(parse(bars("b", [(name, 1.0)], str, reference="plain")))


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"^figures need matplotlib: pip install 'amusd\[plots\]'$"), canvas(10, 10):
        pass
