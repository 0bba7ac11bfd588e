"""Answers decoded together: what can be written down, laws that always hold, and a single one as it ever was."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation.builders import PLAIN, branching, chain, costs, of_answers, own_tokens, simulator, synchronous, windowed
from simulation.test_simulator import any_answers, any_costs, any_schedule

from amusd.config import DecodingConfig
from amusd.simulation.cost import Costs, Duration, Shared
from amusd.simulation.simulator import Outcome
from amusd.simulation.tokens import Answer, drawn_answers
from amusd.tracing.events import Event
from amusd.tracing.metrics import GenerationMetrics

MILLISECOND = 1_000_000

# Closed forms


@given(st.integers(1, 9), st.integers(0, 3), st.integers(0, 3), st.one_of(st.none(), st.integers(1, 12)))
def test_plain_decoding_takes_a_pass_over_all_of_them_for_a_token_of_each(
    batch_size: int, row_ms: int, sequence_ms: int, knee_rows: int | None
) -> None:
    more = {"row_ns": row_ms * MILLISECOND, "sequence_ns": sequence_ms * MILLISECOND, "knee_rows": knee_rows}
    machine = simulator(0.5, costs(10, **more), num_answers=2 * batch_size, num_tokens=5)
    throughput = replace(machine, batch_size=batch_size).run(PLAIN).throughput
    counted = min(batch_size, knee_rows or batch_size)
    pass_ms = (10 + row_ms * (counted - 1)) * batch_size / counted + sequence_ms * (batch_size - 1)
    assert throughput.tokens_per_second == pytest.approx(batch_size * 1000 / pass_ms, rel=1e-6)


@pytest.mark.parametrize("batch_size", [2, 5])
@pytest.mark.parametrize("decoding", [PLAIN, synchronous(3), windowed(4), chain(0), chain(2), branching(1)])
def test_where_rows_are_free_alike_sequences_go_together_as_one_goes_alone(
    decoding: DecodingConfig, batch_size: int
) -> None:
    single = simulator(0.7, costs(6.5, delay=0.03), num_tokens=150)
    together = replace(single, answers=single.answers * batch_size, batch_size=batch_size)
    alone, outcome = single.run(decoding), together.run(decoding)
    assert all(but_for_shares(answer) == but_for_shares(alone.answers[0]) for answer in outcome.answers)
    assert outcome.throughput.over(alone.throughput) == batch_size
    assert outcome.draft_idle_fraction == pytest.approx(alone.draft_idle_fraction)


def but_for_shares(answer: GenerationMetrics) -> GenerationMetrics:
    """Without the share of the draft's time, of which each sequence of a step has a part."""
    return answer if answer.draft is None else replace(answer, draft=replace(answer.draft, busy_ns=0))


@pytest.mark.parametrize("a", [0.4, 0.8])
@pytest.mark.parametrize("length", [1, 4])
def test_where_rows_are_free_synchronous_batches_gain_what_one_sequence_does(a: float, length: int) -> None:
    machine = simulator(a, costs(6.5), num_answers=8, num_tokens=500)
    batch = replace(machine, batch_size=8)
    gain = batch.run(synchronous(length)).throughput.over(batch.run(PLAIN).throughput)
    assert gain == pytest.approx(
        machine.run(synchronous(length)).throughput.over(machine.run(PLAIN).throughput), rel=0.02
    )


@given(
    st.sampled_from([synchronous(1), synchronous(4), windowed(3), chain(0), chain(2), branching(1)]), st.floats(0, 1)
)
@settings(max_examples=20)
def test_where_a_row_costs_as_much_as_a_pass_nothing_is_gained_by_candidates(
    decoding: DecodingConfig, a: float
) -> None:
    machine = replace(simulator(a, costs(20, knee_rows=1), num_answers=4, num_tokens=60), batch_size=4)
    assert machine.run(decoding).throughput.over(machine.run(PLAIN).throughput) <= 1.01  # slots end one by one


def test_wider_passes_make_shorter_blocks_best() -> None:
    def best_length(batch_size: int) -> int:
        machine = simulator(0.8, costs(6.5, knee_rows=20), num_answers=32, num_tokens=60)
        machine = replace(machine, batch_size=batch_size)
        return max((1, 2, 4, 6), key=lambda length: machine.run(synchronous(length)).throughput.tokens_per_second)

    assert best_length(1) > best_length(8) > best_length(32)


def test_auto_does_not_take_the_time_of_prompts_for_that_of_drafting() -> None:
    """Prompts come in beside the answers of others, at the costs of a CPU. With a rest for each sequence it lost."""
    costs = Costs(
        passes={0: Shared.of_ms(36.0, 0.05)},
        draft_token=Shared.of_ms(3.0, 0.1),
        row_ns=3 * MILLISECOND // 2,
        sequence_ns=5 * MILLISECOND // 2,
        tree_row_ns=MILLISECOND // 5,
        draft_sequence_ns=4 * MILLISECOND // 5,
        target_prefill=Duration.of_ms(110.0),
        draft_prefill=Duration.of_ms(25.0),
    )
    answers = drawn_answers(0.45, num_answers=24, num_tokens=48, seed=1)
    machine = of_answers(answers, costs, max_candidates=7, accept_next=0.3, batch_size=8, seed=1)
    auto = machine.run(DecodingConfig()).throughput
    assert auto.over(machine.run(PLAIN).throughput) > 1.06
    assert all(auto.over(machine.run(synchronous(length)).throughput) > 1.03 for length in (1, 2))


# Laws

sizes = st.integers(1, 6)


@given(any_costs, any_answers, any_schedule, sizes, st.integers(1, 9), st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=60)
def test_every_token_is_delivered_and_every_nanosecond_accounted_for(
    costs: Costs,
    answers: tuple[Answer, ...],
    decoding: DecodingConfig,
    batch_size: int,
    max_candidates: int,
    per_step: int,
    more_ns: int,
) -> None:
    costs = replace(costs, sequence_ns=more_ns, draft_sequence_ns=more_ns, knee_rows=more_ns + 1)
    machine = of_answers(
        answers, costs, max_candidates=max_candidates, tokens_per_step=per_step, accept_next=0.4, batch_size=batch_size
    )
    outcome = machine.run(decoding, keep_events=True)
    assert [answer.num_tokens for answer in outcome.answers] == [len(answer) for answer in answers]
    assert outcome.metrics.num_tokens == outcome.metrics.num_accepted + own_tokens(outcome)
    work = target_work(outcome)
    for answer, span, host_ns in zip(outcome.answers, spans(outcome), outcome.host_ns, strict=True):
        inside = [end - start for start, end in work if span.start_ns <= start and end <= span.end_ns]
        assert answer.total_ns == sum(inside) + host_ns
        assert answer.prefill_ns + answer.pass_ns + answer.wait_ns <= sum(inside)
        if answer.draft is not None:
            assert answer.draft.open_ns >= answer.draft.busy_ns + answer.draft.wait_ns
    check_disjoint(work)
    check_disjoint(spans_of(outcome.draft_events, "draft_prefill", "draft_step", "advance", "rollback", "draft_wait"))
    assert all(sum(e.start_ns <= s.start_ns < e.end_ns for e in spans(outcome)) <= batch_size for s in spans(outcome))
    assert outcome == machine.run(decoding, keep_events=True)


def spans(outcome: Outcome) -> list[Event]:
    """From the opening of each answer to its last token, in the order of the answers."""
    found = [event for event in outcome.target_events if event.name == "sequence"]
    return sorted(found, key=lambda event: event.sequence_id)


def spans_of(events: Sequence[Event], *names: str) -> list[tuple[int, int]]:
    """When a worker did these things; what it did for several sequences at once counts as one."""
    return sorted({(event.start_ns, event.end_ns) for event in events if event.name in names})


def target_work(outcome: Outcome) -> list[tuple[int, int]]:
    return spans_of(outcome.target_events, "target_prefill", "target_pass", "target_wait")


def check_disjoint(spans: Sequence[tuple[int, int]]) -> None:
    """A worker does one thing at a time."""
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


@given(any_answers, st.integers(1, 6), sizes, st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_what_a_sequence_does_in_synchronous_batches_is_its_own_affair(
    answers: tuple[Answer, ...], length: int, batch_size: int, random: Random
) -> None:
    """No sequence restarts the draft of another: passes, blocks and rollbacks are those of the answer alone."""
    machine = of_answers(answers, costs(1 + 9 * random.random(), knee_rows=random.randint(1, 20)))
    alone, together = (replace(machine, batch_size=size).run(synchronous(length)) for size in (1, batch_size))
    for one, other in zip(alone.answers, together.answers, strict=True):
        assert (one.num_passes, one.acceptance) == (other.num_passes, other.acceptance)
        assert one.draft is not None
        assert other.draft is not None
        assert (one.draft.num_drafted, one.draft.num_rollbacks) == (other.draft.num_drafted, other.draft.num_rollbacks)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), sizes)
def test_the_slot_of_a_finished_sequence_is_taken_by_the_next_answer(lengths: list[int], batch_size: int) -> None:
    machine = of_answers(tuple((True,) * length for length in lengths), costs(10), batch_size=batch_size)
    slots = [0] * batch_size
    begin_ms = {}
    for number, length in enumerate(lengths, start=1):
        free = slots.index(min(slots))
        begin_ms[number] = slots[free]
        slots[free] += 10 * length
    found = spans(machine.run(PLAIN, keep_events=True))
    assert {event.sequence_id: event.start_ns / MILLISECOND for event in found} == begin_ms


def test_rollbacks_come_before_the_next_joint_step_so_that_nobody_is_left_out_of_it() -> None:
    machine = simulator(0.5, costs(8, rollback=Duration((1000,))), num_answers=4, num_tokens=100)
    one, four = (replace(machine, batch_size=size).run(synchronous(3)).throughput for size in (1, 4))
    assert four.over(one) == pytest.approx(4, rel=0.02)


def test_the_throughput_is_that_of_full_slots() -> None:
    """The last answer has the machine to itself from its tenth token on, when the other slot finds no more."""
    answers = tuple((True,) * length for length in (10, 10, 30, 20, 200))
    row = {"row_ns": 10 * MILLISECOND}
    outcome = of_answers(answers, costs(10, **row), batch_size=2).run(PLAIN)
    assert outcome.throughput.tokens_per_second == pytest.approx(2 * 1000 / 20)
    assert outcome.throughput.num_tokens == 2 * (10 + 30)


# A single one

EVERYTHING: dict[str, Any] = {
    "passes": {0: Shared(Duration((9000, 9500)), Duration((9900,), 0.1)), 4: Shared.same(Duration((11_000,)))},
    "draft_token": Shared(Duration((1500, 1700)), Duration((1900,), 0.1)),
    "row_ns": 7,
    "tree_row_ns": 90,
    "host": Shared(Duration((100,)), Duration((300, 500))),
    "host_before_verdict": 0.4,
    "target_prefill": Duration((4000,)),
    "draft_prefill": Duration((1000,)),
    "advance": Duration((30,)),
    "rollback": Duration((60,)),
    "to_target": Duration((50, 90)),
    "to_draft": Duration((40,)),
}
"""Times of every kind, those that depend on what the other worker does among them."""


@pytest.mark.parametrize(
    ("decoding", "total_ns"),
    [
        (PLAIN, 2_263_320),
        (synchronous(3), 1_533_164),
        (windowed(4), 1_569_579),
        (chain(0), 1_514_990),
        (chain(2), 1_596_913),
        (branching(1, rows_per_step=8), 1_244_222),
    ],
)
def test_the_same_answers_one_at_a_time_always_take_the_same_time(decoding: DecodingConfig, total_ns: int) -> None:
    answers = drawn_answers(0.7, num_answers=3, num_tokens=80, seed=5)
    machine = of_answers(
        answers, Costs(**EVERYTHING), max_candidates=7, tokens_per_step=2, accept_next=0.4, seed=5, batch_size=1
    )
    outcome = machine.run(decoding)
    assert outcome.metrics.total_ns == outcome.throughput.slot_ns == total_ns
