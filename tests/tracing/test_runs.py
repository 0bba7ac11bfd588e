"""Several runs of one worker: every event in its own run's file, whoever recorded it and in whatever order."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from amusd.tracing.recorder import SEQUENCES_PER_RUN, RunsRecorder


def names_in(path: Path) -> list[str]:
    return [json.loads(line)["name"] for line in path.read_text().splitlines()] if path.exists() else []


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5), st.booleans())))
def test_an_event_is_in_the_file_of_its_run_and_in_no_other(events: list[tuple[int, int, bool]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.jsonl" for number in range(3)]
        recorder = RunsRecorder("draft", paths)
        for index, (number, sequence, flush) in enumerate(events):
            recorder.span(f"e{index}", index, index + 1, number * SEQUENCES_PER_RUN + sequence)
            if flush:
                recorder.flush()
        recorder.flush()
        assert recorder.events == ()
        for number, path in enumerate(paths):
            own = [f"e{index}" for index, event in enumerate(events) if event[0] == number]
            assert names_in(path) == (["worker", *own] if own else [])


def test_what_belongs_to_no_sequence_stays_with_the_run_that_was_going_on(tmp_path: Path) -> None:
    paths = [tmp_path / "0.jsonl", tmp_path / "1.jsonl"]
    recorder = RunsRecorder("draft", paths)
    recorder.instant("first", 1)
    recorder.instant("second", SEQUENCES_PER_RUN + 1)
    recorder.flush()
    recorder.instant("target_gone", -1)
    recorder.flush()
    assert names_in(paths[0]) == ["worker", "first"]
    assert names_in(paths[1]) == ["worker", "second", "target_gone"]
