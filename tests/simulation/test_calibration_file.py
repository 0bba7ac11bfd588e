"""A calibration written to one file and read back; and what is refused in its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amusd.commands.simulate import simulate
from amusd.commands.simulate.inputs import inputs_of
from amusd.config import RunConfig
from amusd.console import Console
from amusd.errors import ConfigError
from amusd.settings import from_mapping
from amusd.simulation.calibration import Calibration, calibrate
from amusd.simulation.calibration_file import load_calibration, write_calibration
from amusd.simulation.cost import Costs, Duration, Shared

durations = st.builds(
    Duration,
    st.lists(st.integers(0, 10**10), min_size=1, max_size=3).map(tuple),
    st.sampled_from([0.0, 0.05]),
)
shared = st.builds(Shared, durations, durations)
by_number = st.dictionaries(st.integers(0, 16), shared, max_size=3)
costs = st.builds(
    Costs,
    passes=st.dictionaries(st.integers(0, 16), shared, min_size=1, max_size=3),
    draft_token=shared,
    row_ns=st.integers(0, 1000),
    tree_steps=by_number,
    knee_rows=st.none() | st.integers(1, 500),
    host=shared,
    host_before_verdict=st.floats(0, 1),
    target_prefill=durations,
    draft_prefill=durations,
    advance=durations,
    rollback=durations,
    to_target=durations,
    to_draft=durations,
)
traces = st.lists(st.none() | st.booleans(), max_size=9).map(lambda middle: (True, *middle))
calibrations = st.builds(
    Calibration,
    costs=costs,
    traces=st.lists(traces, min_size=1, max_size=3).map(tuple),
    drafter=st.sampled_from(["synthetic", "embedded"]),
    accept_next=st.none() | st.floats(0, 1),
)


@given(calibrations)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, calibration: Calibration) -> None:
    path = tmp_path_factory.mktemp("calibration") / "file.json"
    write_calibration(path, calibration, "a test")
    assert load_calibration(path, "embedded") == calibration


SMALL = {"num_answers": 2, "num_tokens": 80, "synchronous_lengths": [2, 4], "min_candidates": [0, 2]}


def predicted(folder: Path, **values: Any) -> dict[str, Any]:
    folder.mkdir(parents=True)
    config = from_mapping(RunConfig, {"drafter": {"kind": "synthetic"}, "simulate": SMALL} | values)
    return simulate(config, inputs_of(config), Console(json_only=True), folder)


def test_the_file_of_a_run_predicts_what_the_run_predicts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    predicted(run / "events", accept=0.7, verify_ms=10, draft_ms=2)
    path = tmp_path / "file.json"
    write_calibration(path, calibrate(run, "synthetic"), "a simulated run")
    of_run, of_file = (
        predicted(tmp_path / name / "events", calibration=str(source)) for name, source in (("a", run), ("b", path))
    )
    assert of_file == of_run


DOCUMENT = {
    "format": "amusd calibration 1",
    "drafter": "synthetic",
    "accept_next": None,
    "traces": ["1"],
    "costs": {"passes": {}},
}


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[]",
        "{}",
        json.dumps(DOCUMENT | {"format": "amusd calibration 0"}),
        json.dumps(DOCUMENT | {"traces": ["??"]}),
        json.dumps(DOCUMENT | {"traces": ["2"]}),
        json.dumps(DOCUMENT),
    ],
)
def test_any_other_file_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"^calibration=.*file.json: not a calibration file \(.*\)") as caught:
        load_calibration(path, "synthetic")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("samples", [[], [-1]])
def test_times_that_cannot_be_are_refused(tmp_path: Path, samples: list[int]) -> None:
    path = tmp_path / "file.json"
    time = Duration((1,))
    write_calibration(
        path,
        Calibration(Costs(passes={0: Shared.same(time)}, draft_token=Shared.same(time)), ((True,),), "synthetic"),
        "",
    )
    document = json.loads(path.read_text())
    document["costs"]["advance"]["samples_ns"] = samples
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="times must be at least 0, and at least one"):
        load_calibration(path, "synthetic")
