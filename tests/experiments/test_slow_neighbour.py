"""What the experiment with a slow neighbour measures, over a pair within this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime.pair import PROMPT, decoding, pair
from runtime.table_tree import TableTreeDrafter
from tracing.runs import made

from amusd.tracing.events import Event
from amusd.types import Mode
from experiments.common import read_results
from experiments.slow_neighbour import run as slow_neighbour

MS = 1_000_000
PROMPTS = [(*PROMPT[:-1], number) for number in range(4)]


def passed(end_ms: int, sequence: int, tokens: int = 1) -> Event:
    return made("target_pass", (end_ms - 5) * MS, end_ms * MS, sequence, num_tokens=tokens)


def test_times_are_those_of_the_first_answers_while_all_of_them_are_computed() -> None:
    events = [passed(end, 1) for end in (10, 20, 50)]
    events += [passed(end, 2, tokens=3) for end in (20, 50, 90)]
    events += [passed(end, 3) for end in range(10, 90, 10)]  # the neighbour
    times = slow_neighbour.times_of(events, 2)  # from 20 ms, when both had begun, to 50 ms, when one was over
    assert times == slow_neighbour.Times(gaps_ms=[30.0, 30.0], ms_per_token=15.0)


def test_a_neighbour_is_compared_with_one_that_does_the_same_work() -> None:
    times = {case: [slow_neighbour.Times([10.0, 20.0], 10.0)] for case in slow_neighbour.CASES}
    times["short answers"] = [slow_neighbour.Times([20.0, 40.0], 20.0)]
    times["cancelled"] = [slow_neighbour.Times([20.0, 44.0], 21.0)]
    rows = {case: slow_neighbour.row_of(case, 0.7, times, are_identical=True) for case in slow_neighbour.CASES}
    assert rows["read"].token_ratio == 1
    assert rows["short answers"].token_ratio == 2
    assert (rows["cancelled"].token_ratio, rows["cancelled"].p99_ratio) == pytest.approx((1.05, 1.1))
    assert rows["cancelled"].longest_ms == 44
    assert "NO" not in slow_neighbour.text_of(list(rows.values()))


def test_results_say_where_they_come_from(tmp_path: Path) -> None:
    times = {case: [slow_neighbour.Times([10.0, 20.0], 10.0)] for case in slow_neighbour.CASES}
    rows = [slow_neighbour.row_of(case, 0.7, times, are_identical=True) for case in slow_neighbour.CASES]
    settings = slow_neighbour.Settings(num_tokens=20, num_rounds=2, decoding=decoding(Mode.ASYNCHRONOUS, 4))
    slow_neighbour.keep(rows, settings, tmp_path / "new folder" / "out.json")
    written = read_results(tmp_path / "new folder" / "out.json")
    measured = read_results(Path(slow_neighbour.__file__).parent / "results" / "slow_neighbour.json")
    assert set(written) == set(measured)
    assert (written["workload"]["num_tokens"], written["num_rounds"]) == (20, 2)
    assert [row["case"] for row in written["rows"]] == list(slow_neighbour.CASES)
    assert set(written["rows"][0]) == set(measured["rows"][0])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_no_neighbour_changes_a_token_of_the_others(temperature: float) -> None:
    settings = slow_neighbour.Settings(
        num_sequences=3,
        num_tokens=20,
        long_prompt=100,
        num_rounds=1,
        decoding=decoding(Mode.ASYNCHRONOUS, 4, policy="branching"),
    )
    with pair({}, {"tree": TableTreeDrafter}, max_num_seqs=3, prefill_chunk=16) as (engine, draft):
        link = engine.worker.client.link
        rows = slow_neighbour.measure(engine, PROMPTS, settings, temperature)
        assert engine.worker.client.link is link
        assert len(engine.worker._free_slots) == 3
    assert [row.case for row in rows] == list(slow_neighbour.CASES)
    assert all(row.are_identical for row in rows)
    assert draft.error is None


def test_the_candidates_of_the_neighbour_alone_are_lost() -> None:
    settings = slow_neighbour.Settings(num_sequences=2, num_tokens=60, decoding=decoding(Mode.ASYNCHRONOUS, 4))
    with (
        pair({}, {"tree": TableTreeDrafter}, max_num_seqs=2) as (engine, _),
        slow_neighbour.withholding(engine) as link,
    ):
        assert link is not None
        slow_neighbour.run_case(engine, link, PROMPTS, settings, 0.0, "read")
        assert link.num_lost == 0
        num_seen = len(engine.worker.recorder.events)
        slow_neighbour.run_case(engine, link, PROMPTS, settings, 0.0, "no candidates")
        assert link.num_lost > 0
        events = engine.worker.recorder.events[num_seen:]
        neighbour = max(event.sequence_id for event in events)
        passes = [event for event in events if event.name == "target_pass"]
        accepted = {event.sequence_id == neighbour: 0 for event in passes}
        for event in passes:
            accepted[event.sequence_id == neighbour] += event.fields["num_accepted"]
    assert accepted[True] == 0
    assert accepted[False] > 0
