"""The figures show what was measured: a box for each pass, a bar for each row, a cell for each winner."""

from __future__ import annotations

from typing import Any

import pytest
from tracing.runs import Run, named

from amusd.commands import plots
from amusd.tracing.drafted import Fate, judge_steps

pytestmark = pytest.mark.filterwarnings("default")  # of matplotlib, whose version is the user's


def boxes(axes: Any, colour: str) -> list[Any]:
    from matplotlib.colors import to_rgba

    return [patch for patch in axes.patches if patch.get_facecolor() == to_rgba(colour)]


def test_a_timeline_has_a_box_for_each_pass_and_the_share_of_each_fate(real_run: Run) -> None:
    parts = {number: real_run.timeline.only(number) for number in (2, 3)}
    figure = plots.draw_timeline([(f"answer {number}", part) for number, part in parts.items()])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["answer 2", "answer 3"]
    for axes, (number, part) in zip(figure.axes, parts.items(), strict=True):
        metrics = real_run.answers[number - 1].metrics
        assert len(boxes(axes, plots.PASS)) == metrics.num_passes
        (rollbacks,) = axes.lines
        assert len(rollbacks.get_xdata()) == len(named(part.draft, "rollback")) > 0
        steps = judge_steps(part.draft, part.target)
        for fate, (colour, _) in plots.FATES.items():
            shown = sum(patch.get_height() for patch in boxes(axes, colour)) / 0.8
            assert shown == pytest.approx(sum(step.count(fate) / len(step.fates) for step in steps if step.fates))
        assert sum(step.count(Fate.ACCEPTED) for step in steps) > 0


def test_a_comparison_has_a_bar_for_each_row_and_its_speed_up() -> None:
    rows = [
        {"mode": "autoregressive", "tokens_per_second": 20.0, "speedup_vs_autoregressive": 1.0},
        {"mode": "asynchronous", "policy": "auto", "tokens_per_second": 31.0, "speedup_vs_autoregressive": 1.54},
        {"mode": "asynchronous", "policy": "mine.py:make", "tokens_per_second": 30.0, "speedup_vs_autoregressive": 1.5},
    ]
    (axes,) = plots.draw_comparison(rows).axes
    assert [patch.get_width() for patch in axes.patches] == [20.0, 31.0, 30.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "autoregressive",
        "asynchronous (auto)",
        "asynchronous (mine.py:make)",
    ]
    assert "31.0  (1.54x)" in [text.get_text() for text in axes.texts]
