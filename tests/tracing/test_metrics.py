"""The figures of an answer, and events that survive the file: each in that of its own run."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from full_disk import files_of_at_most
from hypothesis import given
from hypothesis import strategies as st
from tracing.runs import made

from amusd.protocol.messages import Progress, TargetHello
from amusd.protocol.wire import decode, encode
from amusd.tracing.events import NO_SEQUENCE
from amusd.tracing.metrics import GenerationMetrics, total
from amusd.tracing.recorder import SEQUENCES_PER_RUN, Recorder, as_format
from amusd.tracing.timeline import read_events

PASS = made("target_pass", 0, 0).fields

ONE = GenerationMetrics(
    num_tokens=10, first_token_ns=30_000_000, total_ns=130_000_000, prefill_ns=20_000_000, pass_ns=97_500_000,
    num_passes=5, num_drafts=4, num_verified=8, num_accepted=5, acceptance=Counter({(2, 1): 3, (2, 2): 1}),
    draft=Progress(1, 20, 2, 60, 120),
)  # fmt: skip


def test_figures_of_one_generation() -> None:
    figures = ONE.as_dict()
    assert figures["tokens_per_second"] == pytest.approx(10 / 0.13)
    assert figures["ms_per_token"] == pytest.approx(13)
    assert figures["time_to_first_token_ms"] == pytest.approx(30)
    assert figures["acceptance_rate"] == 5 / 8
    assert figures["tokens_per_verification"] == 2
    assert figures["mean_acceptance_length"] == figures["speculative_decoding"]["mean_acceptance_length"] == 1 + 5 / 4
    assert figures["acceptance_by_position"] == [1.0, 0.25]
    assert figures["wasted_draft_fraction"] == 0.75
    assert figures["draft_idle_fraction"] == 0.5
    assert figures["target_idle_fraction"] == pytest.approx(12.5 / 130)


def test_a_sum_has_no_counts_of_drafts_if_those_of_a_draft_are_missing() -> None:
    plain, lost = GenerationMetrics(num_tokens=9), GenerationMetrics(num_tokens=40, num_drafts=9, num_accepted=31)
    assert total([ONE, plain]).as_dict()["wasted_draft_fraction"] == 0.75
    assert total([ONE, lost]).as_dict()["wasted_draft_fraction"] is None


def test_figures_under_the_names_that_benchmark_clients_read() -> None:
    metrics = GenerationMetrics(
        num_tokens=5, first_token_ns=30_000_000, total_ns=70_000_000, chunk_gaps_ns=[10_000_000, 25_000_000, 5_000_000],
        num_drafts=3, num_verified=7, num_accepted=4, acceptance=Counter({(2, 2): 2, (3, 0): 1}),
    )  # fmt: skip
    figures = metrics.as_dict()
    names = ("time_per_output_token_ms", "median_inter_token_latency_ms", "p99_inter_token_latency_ms")
    assert [figures[name] for name in names] == [10, 10, 25]
    assert figures["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 4 / 3,
        "draft_acceptance_rate": 4 / 7,
        "acceptance_histogram": [1, 0, 2, 0],
        "acceptance_histogram_by_draft_length": {"2": [0, 0, 2], "3": [1, 0, 0, 0]},
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 7,
        "num_spec_tokens": 3,
    }


def test_a_file_that_cannot_take_events_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder("target", f"{tmp_path}/events")
    recorder.span("target_pass", 100, 200, 1, **PASS)
    recorder.flush()
    assert recorder.is_whole
    with files_of_at_most(1000):
        for number in range(2, 4):
            for _ in range(20):
                recorder.span("target_pass", 100, 200, number, **PASS)
            recorder.flush()
    assert not recorder.is_whole
    assert caplog.messages == [f"{tmp_path}/events/target.jsonl: cannot be written (File too large)"]


def test_the_folder_of_a_refused_run_is_gone_without_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder("draft", f"{tmp_path}/run/events")
    recorder.instant("target_gone", NO_SEQUENCE)
    recorder.flush()
    assert (recorder.is_whole, caplog.messages, list(tmp_path.iterdir())) == (False, [], [])


@pytest.mark.skipif(sys.platform == "darwin", reason="its names are UTF-8")
def test_a_folder_of_any_name_takes_events_and_fits_a_hello(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"{\xff}\xc3\xa9")
    folder.mkdir()
    recorder = Recorder("draft", f"{as_format(folder)}/events")
    assert decode(encode(TargetHello(1, "", recorder.events_path), 1))[2] == TargetHello(1, "", recorder.events_path)
    recorder.instant("target_gone", NO_SEQUENCE)
    recorder.flush()
    assert (recorder.folder, len(read_events(folder, "draft"))) == (folder / "events", 1)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.booleans())))
def test_an_event_is_in_the_file_of_its_run_which_is_made_for_the_first(events: list[tuple[int, int, bool]]) -> None:
    """Events of no sequence (0 here) belong to the current run. Braces in a path are not format fields."""
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
