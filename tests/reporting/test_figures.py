"""Figures: lengths that mean what they say, and axes that end at round numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reporting.pages import Page

from amusd.reporting.columns import percent
from amusd.reporting.figures import WIDTH, bars, lines, round_top, stacked


def widths(source: str) -> list[float]:
    return [float(a["width"]) for name, a in Page(source).elements if name == "rect"]


@given(st.lists(st.floats(0.01, 50), min_size=1, max_size=6))
def test_bars_are_as_long_as_their_values_and_inside_the_figure(values: list[float]) -> None:
    drawn = widths(bars("b", [(str(value), value) for value in values], str, reference="plain"))
    longest, largest = max(drawn), max(values)
    assert longest < WIDTH
    for width, value in zip(drawn, values, strict=True):
        assert width == pytest.approx(longest * value / largest, abs=0.02)


def test_shares_fill_their_bar() -> None:
    (*parts, first, second) = widths(stacked("s", [("all", {"a": 0.25, "b": 0.75})]))
    assert parts == pytest.approx([WIDTH * 0.25 - 1, WIDTH * 0.75 - 1])
    assert first == second  # the legend


def test_a_line_skips_what_was_not_measured_and_keeps_its_look() -> None:
    page = Page(lines("l", ["1", "2", "3"], [("one", [0.0, None, 1.0], 4)], percent, top=1.0, axis="x"))
    series, _legend = [a for name, a in page.elements if name == "polyline"]
    points = [tuple(map(float, point.split(","))) for point in series["points"].split()]
    assert [y for _, y in points] == [170.0, 14.0]
    assert points[0][0] < points[1][0] <= WIDTH
    assert "s4" in series["class"]
    assert {"one, x 1: 0 %", "one, x 3: 100 %"} <= set(page.texts)


@given(st.floats(1e-6, 1e9))
def test_an_axis_reaches_its_highest_value_and_not_much_further(highest: float) -> None:
    top = round_top(highest)
    assert highest <= top * (1 + 1e-9)
    assert top <= 2.6 * highest
    assert float(f"{top / 4:.2g}") == pytest.approx(top / 4)


def test_an_axis_without_values_still_has_a_length() -> None:
    assert round_top(0.0) == 1.0
