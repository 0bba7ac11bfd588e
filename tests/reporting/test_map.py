"""The map: every cell says what the result says, in its winner's colour; measured runs stand where they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reporting.drawings import box, fill, hints, marked, parse, placed, points, texts

from amusd.config import AsynchronousPolicy, SimulateConfig
from amusd.reporting.map import NAMES_AND_COLOURS, Axis, draw_map
from amusd.reporting.plots import INK
from amusd.types import Mode

MEAN_5 = {"mean_ms": 5.0}
PASS = {"mean_ms": 40.0, "num_samples": 1}
INPUTS = {"costs": {"target_pass": {"0": PASS}, "to_target": MEAN_5, "to_draft": MEAN_5}}
WINNERS = {(0.5, 2): "autoregressive", (0.5, 8): "synchronous", (0.9, 2): "chain", (0.9, 8): "branching"}
VALUES = st.lists(st.floats(0, 100, width=16), min_size=1, max_size=8)


def result(
    winners: dict[tuple[float, float], str] = WINNERS, points: Sequence[dict[str, Any]] = (), **inputs: Any
) -> dict[str, Any]:
    cells = []
    for number, ((accept, ratio), winner) in enumerate(winners.items()):
        speedups = {"autoregressive": 1.0, "synchronous": 1.1, "chain": 0.9, "branching": 0.8}
        speedups[winner] = 1.2 + number / 4
        cells.append({"accept": accept, "ratio": ratio, "speedups": speedups, "winner": winner})
    return {"grid": cells, "points": list(points), "inputs": INPUTS | inputs}


def point(accept: float, ratio: float, winner: str | None = "chain") -> dict[str, Any]:
    return {"run_dir": "r", "drafter": "ngram", "accept": accept, "ratio": ratio, "winner": winner, "speedup": 1.5}


def drawn(found: dict[str, Any], **settings: Any) -> ET.Element:
    return parse(draw_map(found, SimulateConfig(grid=True, **settings)))


def place(ring: ET.Element) -> tuple[float, float]:
    (found,) = points(ring)
    return found


def texts_in(root: ET.Element, cell: ET.Element) -> list[tuple[str, float, float]]:
    """The texts that stand in a cell."""
    area = box(cell)
    return [(words, x, y) for words, x, y in placed(root) if area.left < x < area.right and area.top < y < area.bottom]


def test_each_cell_says_and_shows_what_the_result_says() -> None:
    found = result()
    root = drawn(found)
    cells = marked(root, "cell")
    assert len(cells) == len(found["grid"])
    for cell, expected in zip(cells, found["grid"], strict=True):
        winner, speedups = expected["winner"], expected["speedups"]
        gain = 100 * (speedups[winner] / speedups["synchronous"] - 1)
        assert [words for words, _, _ in texts_in(root, cell)] == [f"{speedups[winner]:.2f}", f"{gain:+.0f} %"]
        assert cell.get("class") == f"cell {winner}"
        assert fill(cell) == NAMES_AND_COLOURS[winner][1]
        (hint,) = hints([cell])
        assert hint.startswith(f"acceptance {expected['accept']:g}, {expected['ratio']} draft steps")
        for name, speedup in speedups.items():
            assert f"{NAMES_AND_COLOURS[name][0]} {speedup:.2f}" in hint


def test_batch_sizes_take_the_place_of_ratios() -> None:
    found = result({(0.8, 1): "chain", (0.8, 64): "synchronous"})
    for cell in found["grid"]:
        cell["batch_size"], cell["ratio"] = cell["ratio"], 6.5
    root = drawn(found, grid_batch_sizes=(1, 64))
    lower, upper = marked(root, "cell")
    assert box(upper).centre[1] < box(lower).centre[1]
    assert [hint.partition(":")[0] for hint in hints([lower, upper])] == [
        "acceptance 0.8, 1 answers at a time",
        "acceptance 0.8, 64 answers at a time",
    ]
    named = texts(root)
    assert {"answers at a time", "1", "64"} <= set(named)
    assert not any("draft steps per target pass" in words or words.endswith(" ms") for words in named)


def test_acceptance_runs_to_the_right_and_draft_steps_upwards() -> None:
    places = {place: box(cell).centre for place, cell in zip(WINNERS, marked(drawn(result()), "cell"), strict=True)}
    assert places[0.5, 2][0] == places[0.5, 8][0] < places[0.9, 2][0] == places[0.9, 8][0]
    assert places[0.5, 8][1] == places[0.9, 8][1] < places[0.5, 2][1] == places[0.9, 2][1]


def test_the_legend_names_every_policy_that_was_tried_in_its_colour() -> None:
    root = drawn(result())
    expected = {name: colour for name, colour in NAMES_AND_COLOURS.values() if name not in ("windowed", "auto")}
    names = [words for words in texts(root) if words in {name for name, _ in NAMES_AND_COLOURS.values()}]
    colours = {colour for _, colour in NAMES_AND_COLOURS.values()}
    plain = [group for group in root.iter("g") if group.find("path") is not None and group.get("class") is None]
    samples = [fill(group) for group in plain if fill(group) in colours and box(group).top < box(group).bottom]
    assert dict(zip(names, samples, strict=True)) == expected


def test_every_policy_has_a_name_and_a_colour_of_its_own() -> None:
    modes = {mode.value for mode in Mode} - {Mode.ASYNCHRONOUS.value}
    assert modes | set(get_args(AsynchronousPolicy)) <= set(NAMES_AND_COLOURS)
    for column in zip(*NAMES_AND_COLOURS.values(), strict=True):
        assert len(set(column)) == len(NAMES_AND_COLOURS)


@pytest.mark.parametrize("colour", [colour for _, colour in NAMES_AND_COLOURS.values()])
def test_dark_text_can_be_read_on_every_colour(colour: str) -> None:
    assert (luminance(colour) + 0.05) / (luminance(INK) + 0.05) >= 4.5


def luminance(colour: str) -> float:
    """Relative, as the guidelines for accessible web content (WCAG 2) define it."""
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_run_measured_at_a_cell_stands_in_its_middle_and_is_named() -> None:
    root = drawn(result(points=[point(0.9, 8), point(0.5, 2, winner=None)]))
    rings = [place(ring) for ring in marked(root, "point")]
    cells = [box(cell).centre for cell in marked(root, "cell")]
    assert rings == [pytest.approx(cells[3], abs=0.02), pytest.approx(cells[0], abs=0.02)]
    named = [
        "measured: ngram, acceptance 0.90, 8.0 steps a pass; chain won, 1.50",
        "measured: ngram, acceptance 0.50, 2.0 steps a pass; nothing was compared",
    ]
    assert hints(marked(root, "point")) == named
    for number, (words, (x, y)) in enumerate(zip(named, rings, strict=True), start=1):
        digits = [(across, down) for digit, across, down in placed(root) if digit == str(number)]
        (line,) = [down for text, _, down in placed(root) if text == words]
        for expected in ((x, y + 4.5), (24, line)):
            assert any(expected == pytest.approx(found, abs=1) for found in digits)


@settings(max_examples=40)
@given(st.floats(0.4, 1.0), st.floats(1.5, 11.0))
def test_no_text_of_a_cell_is_hidden_by_a_ring_that_stands_alone(accept: float, ratio: float) -> None:
    root = drawn(result(points=[point(accept, ratio)]))
    ((x, y),) = [place(ring) for ring in marked(root, "point")]
    for cell in marked(root, "cell"):
        own = [(across, down) for words, across, down in texts_in(root, cell) if words != "1"]
        assert len(own) == 2
        for across, down in own:
            assert abs(across - x) >= 33.9 or abs(down - 5 - y) >= 9.9


def test_between_two_ratios_the_logarithm_counts() -> None:
    root = drawn(result(points=[point(0.7, 4)]))
    ((x, y),) = [place(ring) for ring in marked(root, "point")]
    cells = [box(cell).centre for cell in marked(root, "cell")]
    assert x == pytest.approx((cells[0][0] + cells[2][0]) / 2, abs=0.02)
    assert y == pytest.approx((cells[0][1] + cells[1][1]) / 2, abs=0.02)


@given(VALUES, st.floats(-50, 200), st.floats(-50, 200))
def test_places_keep_the_order_of_values_and_stay_on_the_map(values: list[float], one: float, other: float) -> None:
    axis = Axis.of(values, 10)
    lower, upper = sorted((one, other))
    assert 0 <= axis.place(lower) <= axis.place(upper) <= axis.length == 10 * len(set(values))
    assert [axis.place(value) for value in sorted(set(values))] == pytest.approx(
        [10 * number + 5 for number in range(len(set(values)))]
    )


@given(VALUES.filter(lambda values: len(set(values)) > 1), st.data())
def test_between_the_outermost_cells_different_values_have_different_places(
    values: list[float], data: st.DataObject
) -> None:
    axis = Axis.of(values, 10)
    steps = st.integers(0, 1000).map(lambda part: min(values) + (max(values) - min(values)) * part / 1000)
    one, other = data.draw(steps), data.draw(steps)
    if other - one > 1e-3:
        assert axis.place(one) < axis.place(other)
    elif one == other:
        assert axis.place(one) == axis.place(other)


@pytest.mark.parametrize("num_columns", [1, 2, 6, 15])
def test_texts_and_boxes_stay_on_the_page(num_columns: int) -> None:
    winners = {(round(0.05 * (column + 1), 2), ratio): "chain" for column in range(num_columns) for ratio in (1.5, 100)}
    root = drawn(result(winners, [point(0.0, 1e6), point(1.0, 1.0)]))
    _, _, width, height = map(float, root.get("viewBox", "").split())
    for cell in marked(root, "cell"):
        area = box(cell)
        assert area.right <= width
        assert len(max((words for words, _, _ in texts_in(root, cell)), key=len)) * 9 <= area.right - area.left
    lines = [(words, y) for words, x, y in placed(root) if x == pytest.approx(14)]
    assert lines
    assert all(y < height for _, y in lines)
    assert max(len(words) for words, _ in lines) * 7 <= width


def test_the_caption_says_what_the_map_rests_on() -> None:
    apart = {
        "draft_and_target_apart": {"mean_ms": 12.34, "num_samples": 3},
        "at_the_same_time": {"mean_ms": 99.0, "num_samples": 1},
    }
    costs = {"target_pass": {"0": apart, "4": apart}, "to_target": MEAN_5, "to_draft": {"mean_ms": 0.25}}
    settings: dict[str, Any] = {
        "jitter": 0.05,
        "synchronous_lengths": (1, 2, 3),
        "min_candidates": (0, 2, 5),
        "seed": 7,
    }
    words = " ".join(texts(drawn(result(costs=costs), **settings)))
    for fact in (
        "a target pass of 12.3 ms, varying by 5 %",
        "5 ms to the target, 0.25 ms back",
        "blocks of 1 to 3 tokens",
        "waits for 0, 2, 5 candidates",
        "16 answers of 512 tokens, seed 7",
    ):
        assert fact in words
    settings["jitter"] = 0.0
    assert "a target pass of 12.3 ms, as measured;" in " ".join(texts(drawn(result(costs=costs), **settings)))
    assert "a target pass of 40 ms, always the same; a message takes 5 ms." in " ".join(texts(drawn(result())))


def test_the_time_of_a_step_stands_at_its_ratio() -> None:
    found = texts(drawn(result()))
    assert found.index("5 ms") == found.index("8") + 1
    assert found.index("20 ms") == found.index("2") + 1


def test_a_ratio_that_is_no_power_of_two_is_shown_as_it_was_given() -> None:
    assert "10.3" in texts(drawn(result({(0.5, 10.3): "chain"})))
