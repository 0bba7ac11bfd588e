"""Several runs of one worker: every event in its own run's file, whoever recorded it and in whatever order."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from amusd.tracing.recorder import SEQUENCES_PER_RUN, Recorder, as_format


def names_in(run: Path) -> list[str]:
    path = run / "events" / "draft.jsonl"
    return [json.loads(line)["name"] for line in path.read_text().splitlines()] if path.exists() else []


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.booleans())))
def test_an_event_is_in_the_file_of_its_run_which_is_made_for_the_first(events: list[tuple[int, int, bool]]) -> None:
    """What belongs to no sequence (0 here) stays with the run that was going on. Braces in a path are no fields."""
    with tempfile.TemporaryDirectory(prefix="{run}") as folder:
        own: list[list[str]] = [[], [], []]
        for run in range(3):
            (Path(folder) / str(run)).mkdir()
        recorder = Recorder("draft", f"{as_format(Path(folder))}/{{run}}/events")
        now = 0
        for index, (run, sequence, flush) in enumerate(events):
            now = run if sequence else now
            recorder.span(f"e{index}", index, index + 1, run * SEQUENCES_PER_RUN + sequence if sequence else -1)
            own[now].append(f"e{index}")
            if flush:
                recorder.flush()
        recorder.flush()
        assert recorder.events == ()
        for run, names in enumerate(own):
            assert names_in(Path(folder) / str(run)) == (["worker", *names] if names else [])
