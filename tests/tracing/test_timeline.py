"""The fate of each drafted token and each message in the events of both workers, and `amusd trace`, which shows it."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation.builders import PLAIN, chain, synchronous, write_run
from tracing.runs import MACHINE, SCHEDULES, made, simulated

from amusd.commands.trace import THREADS, chrome_trace, run
from amusd.errors import ConfigError
from amusd.tracing.events import Event
from amusd.tracing.timeline import Timeline, match_messages


def fates(target: list[Event], draft: list[Event]) -> list[tuple[int, ...]]:
    """Numbers of tokens of each step that were accepted, overtaken, wasted."""
    return [tuple(found.values()) for _, found in Timeline(target, draft).steps()]


def test_rolled_back_tokens_are_wasted_and_kept_ones_may_be_overtaken() -> None:
    draft = [
        made("draft_prefill", 0, 1, 1, num_tokens=4),
        made("draft_step", 1, 2, 1, num_tokens=3, length=7),  # positions 4, 5, 6
        made("advance", 2, 3, 1, num_discarded=0, committed_length=5),
        made("rollback", 3, 4, 1, num_discarded=1, committed_length=7),  # 6 was wrong
        made("draft_step", 4, 5, 1, num_tokens=1, length=8),
    ]
    target = [
        made("target_pass", 0, 1, 1, committed_length=5, num_tokens=1, num_accepted=0),
        made("target_pass", 1, 2, 1, committed_length=7, num_tokens=2, num_accepted=1),
    ]
    assert fates(target, draft) == [(1, 1, 1), (0, 0, 1)]


@pytest.mark.parametrize("fan_out", [1, 2])
def test_a_draft_that_came_in_the_place_of_a_lost_one_is_judged_by_its_own_steps(fan_out: int) -> None:
    kept = {"kept_steps": [1]} if fan_out > 1 else {}
    draft = [
        made("draft_prefill", 0, 1, 1, num_tokens=4, fan_out=fan_out),
        made("draft_step", 1, 4, 1, num_tokens=2, length=6),  # positions 4 and 5: lost
        made("sequence", 0, 4, 1),
        made("draft_prefill", 6, 7, 1, num_tokens=4, fan_out=fan_out),
        made("draft_step", 7, 8, 1, num_tokens=1, length=5),  # position 4 anew
        made("advance", 8, 9, 1, num_discarded=0, num_adopted=0, committed_length=5, **kept),
    ]
    target = [made("target_pass", 0, 8, 1, committed_length=5, num_tokens=1, num_accepted=1)]
    assert fates(target, draft) == [(0, 0, 2), (1, 0, 0)]


def test_a_token_of_a_tree_counts_in_its_own_step_and_what_was_looked_up_in_none() -> None:
    draft = [
        made("draft_prefill", 0, 1, 1, num_tokens=4, fan_out=2),
        made("draft_step", 1, 2, 1, num_tokens=1, length=7),
        made("draft_step", 2, 3, 1, num_tokens=3, length=13),
        made("advance", 3, 4, 1, num_discarded=0, num_adopted=0, committed_length=8, kept_steps=[1, 2, 0, 2]),
        made("draft_step", 4, 5, 1, num_tokens=2, length=10),
        made("rollback", 5, 6, 1, num_discarded=2, num_adopted=1, committed_length=10, kept_steps=[3]),
    ]
    target = [
        made("target_pass", 0, 1, 1, committed_length=8, num_tokens=4, num_accepted=3),
        made("target_pass", 1, 2, 1, committed_length=10, num_tokens=2, num_accepted=1),
    ]
    assert fates(target, draft) == [(1, 0, 0), (1, 1, 1), (1, 0, 1)]


@given(data=st.data(), num_sent=st.integers(0, 12))
def test_lost_messages_do_not_shift_the_others(data: st.DataObject, num_sent: int) -> None:
    sent = [made("send", n, n, 1, message="candidate", start=n) for n in range(num_sent)]
    arrived = [event for event in sent if data.draw(st.booleans())]
    received = [made("receive", e.start_ns + 50, e.end_ns + 50, 1, **e.fields, reception="taken") for e in arrived]
    assert [one for one, _ in match_messages(sent, received)] == arrived


# The trace file, in the Trace Event Format


ON_A_THREAD = {"ph", "name", "pid", "tid", "cat", "ts"}
KEYS = {
    "M": {"ph", "name", "pid", "args"},
    "X": ON_A_THREAD | {"dur", "args"},
    "i": ON_A_THREAD | {"s", "args"},
    "s": ON_A_THREAD | {"id"},
    "f": ON_A_THREAD | {"id", "bp"},
}
"""The phases of events that are written, each with the keys that the format demands."""


@pytest.fixture(params=SCHEDULES)
def part(request: pytest.FixtureRequest) -> Timeline:
    return simulated(request.param)[1]


def traced(part: Timeline) -> list[dict[str, Any]]:
    trace = json.loads(json.dumps(chrome_trace(part, {"sequence_id": 3})))
    assert (trace["displayTimeUnit"], trace["metadata"]["sequence_id"]) == ("ms", 3)
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def test_every_event_is_in_the_trace_event_format(part: Timeline) -> None:
    events = traced(part)
    for event in events:
        assert KEYS[event["ph"]] <= set(event) <= KEYS[event["ph"]] | {"tid"}, event
    names = [(event["name"], event["pid"], event.get("tid")) for event in events if event["ph"] == "M"]
    assert len({*names}) == len(names) == 2 * (1 + len(THREADS))
    for track in {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"}:
        assert ("thread_name", *track) in names
        slices = [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == track]
        assert all(0 <= before["ts"] + before["dur"] <= after["ts"] + 0.002 for before, after in pairwise(slices))


def test_every_arrow_starts_and_ends_in_a_slice_and_goes_forward(part: Timeline) -> None:
    events = traced(part)
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert set(starts) == set(ends)
    assert len(starts) == len(part.to_draft) + len(part.to_target)
    assert bool(starts) == bool(part.draft)
    slices = {(event["pid"], event["tid"], event["ts"], event["name"]) for event in events if event["ph"] == "X"}
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        assert (start["pid"], start["tid"], start["ts"], f"send {start['name']}") in slices
        assert (end["pid"], end["tid"], end["ts"], f"receive {end['name']}") in slices


def test_a_lost_draft_is_marked() -> None:
    part = Timeline([made("target_prefill", 0, 10, 1), made("draft_lost", 20, 20, 1, reason="gone")], [])
    marks = [(event["name"], event["ts"]) for event in traced(part) if event["ph"] == "i"]
    assert marks == [("draft lost", 0.02)]


# The command on real run directories and on other folders


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    write_run(tmp_path, MACHINE, PLAIN, synchronous(4), chain(2), synchronous(2))
    return tmp_path


def test_the_file_the_picture_and_the_figures_of_a_sequence(run_directory: Path, capsys: Any) -> None:
    assert run(run_directory) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("sequence 2001: asynchronous (chain), drafter simulated\n")
    assert "target at work " in printed
    assert " candidates accepted" in printed
    assert "asynchronous (chain), drafter simulated:\n" in printed
    assert "\n  2 candidates: " in printed
    assert "\n  draft steps by rows: 1: " in printed
    assert " passes began without a candidate; for " in printed
    assert json.loads((run_directory / "trace.json").read_text())["metadata"]["sequence_id"] == 2001
    svg = (run_directory / "timeline.svg").read_text()
    assert "synchronous, blocks of 2" in svg
    assert "asynchronous (chain)" in svg
    assert (run_directory / "timeline.png").is_file()


def test_without_matplotlib_there_is_a_trace_and_a_line_about_the_picture(
    run_directory: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.lines", "matplotlib.patches"):
        monkeypatch.setitem(sys.modules, name, None)
    assert run(run_directory) == 0
    assert "timeline.svg: not drawn: figures need matplotlib: pip install 'amusd[plots]'\n" in capsys.readouterr().out
    assert (run_directory / "trace.json").is_file()


def test_what_cannot_be_traced_is_said_in_one_line(run_directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"^sequence=9: no such sequence; this run has sequence=1 to 3001$"):
        run(run_directory, "sequence=9")
    (empty := run_directory / "empty").mkdir()
    with pytest.raises(ConfigError, match="hold no answer"):
        run(empty)
    (empty / "events").mkdir()
    (empty / "events" / "target.jsonl").write_text('{"name": "target_pass"}\n')
    with pytest.raises(ConfigError, match="cannot be read"):
        run(empty)
