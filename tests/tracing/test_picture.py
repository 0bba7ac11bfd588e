"""The picture of a real run shows what the metrics count, and stays inside its page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from reporting.drawings import box, parse, texts
from tracing.runs import Run, made, named

from amusd.reporting.picture import MAX_LINES, WIDTH, draw
from amusd.tracing.timeline import Timeline


def kinds(root: ET.Element) -> Counter[str]:
    return Counter(element.get("class", "") for element in root.iter())


@pytest.mark.usefixtures("whole_picture")
@pytest.mark.parametrize("sequence_id", [2, 3, 4])
def test_boxes_are_as_many_as_the_metrics_say(real_run: Run, sequence_id: int) -> None:
    part = real_run.timeline.only(sequence_id)
    found = kinds(parse(draw(part, "a title", ["a line"])))
    metrics = real_run.answers[sequence_id - 1].metrics
    assert found["pass"] == metrics.num_passes
    assert found["token accepted"] + found["token accepted late"] == metrics.num_accepted
    assert found["token accepted late"] == metrics.num_late_accepted
    rejected = found["token rejected"] + found["token rejected late"]
    assert rejected == metrics.num_verified - metrics.num_accepted > 0
    assert found["token own"] == metrics.num_tokens - metrics.num_accepted
    assert metrics.draft is not None
    assert found["step accepted"] == metrics.num_accepted
    drafted = sum(count for kind, count in found.items() if kind.startswith("step "))
    assert drafted == metrics.draft.num_drafted
    assert found["verdict rollback"] == len(named(part.draft, "rollback")) > 0


@pytest.mark.usefixtures("whole_picture")
def test_plain_decoding_is_a_row_of_passes_with_one_token_each(real_run: Run) -> None:
    found = kinds(parse(draw(real_run.timeline.only(1), "plain", [])))
    assert found["pass"] == found["token own"] == real_run.answers[0].metrics.num_passes
    assert found["token accepted"] == found["step accepted"] == found["verdict"] == 0


@pytest.mark.usefixtures("whole_picture")
def test_everything_stays_on_the_page_and_texts_are_there(real_run: Run) -> None:
    root = parse(draw(real_run.timeline.only(3), "the title", ["first", "second"]))
    drawn = [group for group in root.iter("g") if group.get("class")]
    assert len(drawn) > 100
    for group in drawn:
        area = box(group)
        assert area.left >= 0
        assert area.right <= WIDTH + 0.01
    found = texts(root)
    for words in ("the title", "first", "second", "target", "draft", "candidate rejected"):
        assert words in found
    assert not any("cut off" in text for text in found)


def test_a_long_answer_is_cut_and_says_so() -> None:
    passes = [
        made(
            "target_pass",
            1_000_000 * number,
            1_000_000 * number + 900_000,
            1,
            num_judged=0,
            num_accepted=0,
            num_candidates=0,
            num_tokens=1,
            committed_length=number,
        )
        for number in range(1, 400)
    ]
    root = parse(draw(Timeline.of(passes, []), "long", []))
    assert "The end of the answer is cut off here." in texts(root)
    assert "0 ms" in texts(root)
    assert texts(root).count("target") == MAX_LINES
    assert 0 < kinds(root)["pass"] < 399


def test_an_answer_that_never_had_a_pass_is_still_a_picture(tmp_path: Path) -> None:
    root = parse(draw(Timeline.of([made("target_prefill", 5, 10, 1)], []), "nothing", []))
    assert kinds(root)["pass"] == 0
