"""Answers decoded together: closed forms, laws that always hold, and inputs that are read back from events."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lines import refusal
from simulation.builders import PLAIN, chain, costs, of_answers, rows_of, simulator, synchronous, write_run
from simulation.test_simulator import spans

from amusd.config import DecodingConfig
from amusd.simulation.calibration import calibrate
from amusd.simulation.cost import Costs, Duration
from amusd.simulation.simulator import Simulator
from amusd.simulation.tokens import Trace, drawn_answers

MILLISECOND = 1_000_000

# Closed forms


@given(st.integers(1, 9), st.integers(0, 3), st.integers(0, 3), st.one_of(st.none(), st.integers(1, 12)))
@settings(max_examples=30)
def test_plain_decoding_takes_a_pass_over_all_of_them_for_a_token_of_each(
    batch_size: int, row_ms: int, sequence_ms: int, knee_rows: int | None
) -> None:
    more = {"passes": rows_of(10, row_ms), "sequence_ns": sequence_ms * MILLISECOND, "knee_rows": knee_rows}
    machine = simulator(0.5, costs(10, **more), num_answers=2 * batch_size, num_tokens=5)
    speed = replace(machine, batch_size=batch_size).run(PLAIN).tokens_per_second
    counted = min(batch_size, knee_rows or batch_size)
    pass_ms = (10 + row_ms * (counted - 1)) * batch_size / counted + sequence_ms * (batch_size - 1)
    assert speed == pytest.approx(batch_size * 1000 / pass_ms, rel=1e-6)


def test_auto_does_not_take_the_time_of_prompts_for_that_of_drafting() -> None:
    """Prompts are admitted beside other answers, at the costs of a CPU. With one rest per sequence `auto` lost here."""
    costs = Costs(
        passes=rows_of(36.0, 1.5, 0.05), draft_token=Duration.of_ms(3.0, 0.1), tree_row_ns=MILLISECOND // 5,
        sequence_ns=5 * MILLISECOND // 2, draft_sequence_ns=4 * MILLISECOND // 5,
        target_prefill=Duration.of_ms(110.0), draft_prefill=Duration.of_ms(25.0),
    )  # fmt: skip
    answers = drawn_answers(0.45, num_answers=24, num_tokens=48, seed=1)
    machine = of_answers(answers, costs, max_candidates=7, accept_next=0.3, batch_size=8, seed=1)
    auto = machine.run(DecodingConfig()).tokens_per_second
    assert auto / machine.run(PLAIN).tokens_per_second > 1.06
    assert all(auto / machine.run(synchronous(length)).tokens_per_second > 1.03 for length in (1, 2))


# Laws


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 6))
@settings(max_examples=30)
def test_the_slot_of_a_finished_sequence_is_taken_by_the_next_answer(lengths: list[int], batch_size: int) -> None:
    machine = of_answers(tuple((True,) * length for length in lengths), costs(10), batch_size=batch_size)
    slots = [0] * batch_size
    begin_ms = {}
    for number, length in enumerate(lengths, start=1):
        free = slots.index(min(slots))
        begin_ms[number] = slots[free]
        slots[free] += 10 * length
    found = spans(machine.run(PLAIN))
    assert {event.sequence_id: event.start_ns / MILLISECOND for event in found} == begin_ms


# Times and outcomes that a simulation is given


def test_sequences_share_the_fixed_part_of_a_pass_and_of_a_step() -> None:
    passes = {number: Duration((1000 + 10 * number,)) for number in range(20)}
    costs = Costs(passes=passes, draft_token=Duration((100,)), tree_row_ns=5)
    costs = replace(costs, sequence_ns=50, draft_sequence_ns=7)

    def taken(costs: Costs, number: int, num_sequences: int) -> tuple[int, int, int]:
        """Times in ns of a pass over candidates, of a step with one token each, and of a step over nodes."""
        pass_ns = costs.pass_ns(number, False, Random(0), num_sequences=num_sequences)
        step_ns = costs.step_ns(False, Random(0), num_sequences=num_sequences)
        return pass_ns, step_ns, costs.tree_step_ns(number, False, Random(0), num_sequences=num_sequences)

    assert taken(costs, 9, 1) == (1090, 100, 140)
    assert taken(costs, 9, 4) == (1120 + 150, 115 + 21, 140 + 21)
    # from four rows on, each costs a quarter of what four do; the caches are read all the same
    bent = replace(costs, knee_rows=4)
    assert taken(bent, 4, 4) == (2060 + 150, 115 + 21, 115 + 21)
    assert taken(bent, 10, 8)[1:] == (230 + 49, round(2.5 * 115) + 49)


@given(st.floats(0, 1), st.integers(1, 5), st.integers(1, 60), st.integers(0, 5))
def test_the_given_share_of_tokens_is_right(accept: float, num_answers: int, num_tokens: int, seed: int) -> None:
    answers = drawn_answers(accept, num_answers=num_answers, num_tokens=num_tokens, seed=seed)
    assert [len(answer) for answer in answers] == [num_tokens] * num_answers
    assert sum(map(sum, answers)) == round(accept * num_tokens * num_answers)
    assert all(abs(sum(answer) - accept * num_tokens) <= 1 for answer in answers)


# Inputs read back from events equal those of the simulation


def ms(alone: float, together: float | None = None) -> Duration:
    return Duration((round(1e6 * alone),), together=() if together is None else (round(1e6 * together),))


COSTS = Costs(
    passes={0: ms(10.0, 11.0), 4: ms(12.0, 13.0)},
    draft_token=ms(1.5, 1.7), host=ms(0.2, 0.4), target_prefill=ms(20.0), draft_prefill=ms(5.0),
    advance=ms(0.05), rollback=ms(0.1), to_target=ms(0.08), to_draft=ms(0.06),
)  # fmt: skip


def machine() -> Simulator:
    return of_answers(drawn_answers(0.7, num_answers=3, num_tokens=100, seed=2), COSTS, max_candidates=7)


def measured(folder: Path, simulator: Simulator, *schedules: DecodingConfig) -> tuple[Costs, Sequence[Trace]]:
    write_run(folder, simulator, *schedules)
    return calibrate(folder, "embedded")[:2]


def test_the_times_that_went_in_come_out(tmp_path: Path) -> None:
    found, _ = measured(tmp_path, machine(), PLAIN, synchronous(4), chain(2))
    for width, (alone, together) in {0: (10_000_000, 11_000_000), 4: (12_000_000, 13_000_000)}.items():
        assert set(found.passes[width].samples) == {alone}
        assert set(found.passes[width].together) == {together}
    assert set(found.draft_token.samples) == {1_500_000}
    assert set(found.draft_token.together) == {1_700_000}
    assert (set(found.host.samples), set(found.host.together)) == ({200_000}, {400_000})
    for name in ("target_prefill", "draft_prefill", "advance", "rollback", "to_target", "to_draft"):
        assert set(getattr(found, name).samples) == set(getattr(COSTS, name).samples), name


def test_outcomes_are_seen_as_they_were(tmp_path: Path) -> None:
    simulator = machine()
    _, traces = measured(tmp_path, simulator, PLAIN, chain(3))
    for trace, answer in zip(traces, simulator.answers, strict=True):
        assert all(known in (None, right) for known, right in zip(trace, answer, strict=True))
    assert sum(known is None for trace in traces for known in trace) < 0.2 * 300


def test_a_run_that_says_too_little_is_refused_in_one_line(tmp_path: Path) -> None:
    (events := tmp_path / "events").mkdir()
    dataclasses.replace(machine(), answers=((True,),)).run(synchronous(1), events)
    assert "no draft token that was compared" in refusal(lambda: calibrate(tmp_path, "embedded"))
