"""Several runs of one worker: every event in its own run's file, whoever recorded it and in whatever order."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from amusd.tracing.recorder import SEQUENCES_PER_RUN, Recorder, as_format
from amusd.tracing.timeline import read_events


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.booleans())))
def test_an_event_is_in_the_file_of_its_run_which_is_made_for_the_first(events: list[tuple[int, int, bool]]) -> None:
    """What belongs to no sequence (0 here) stays with the run that was going on. Braces in a path are no fields."""
    with tempfile.TemporaryDirectory(prefix="{run}") as folder:
        own: list[list[int]] = [[], [], []]
        for run in range(3):
            (Path(folder) / str(run)).mkdir()
        recorder = Recorder("draft", f"{as_format(Path(folder))}/{{run}}/events")
        now = 0
        for index, (run, sequence, flush) in enumerate(events):
            now = run if sequence else now
            recorder.span("draft_wait", index, index, run * SEQUENCES_PER_RUN + sequence if sequence else -1)
            own[now].append(index)
            if flush:
                recorder.flush()
        recorder.flush()
        for run, numbers in enumerate(own):
            found = read_events(Path(folder) / str(run), "draft")
            assert [event.start_ns for event in found] == numbers
