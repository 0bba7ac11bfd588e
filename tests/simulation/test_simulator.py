"""The simulated pair: known limits, and laws that always hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import closed_forms
from simulation.builders import PLAIN, branching, chain, costs, of_answers, simulator, speedup, synchronous

from amusd.config import DecodingConfig
from amusd.errors import ConfigError
from amusd.policies.base import Decision, Policy, TargetView
from amusd.simulation.cost import Costs, Duration
from amusd.simulation.simulator import Outcome, Simulator
from amusd.simulation.tokens import Script
from amusd.tracing.events import Event

# Known limits


def test_a_flawless_draft_is_bound_by_its_own_speed_or_by_the_width_of_a_pass() -> None:
    flawless = simulator(1.0, costs(6), num_tokens=1000)
    assert speedup(flawless, chain(0)) == pytest.approx(6, rel=0.01)
    narrow = of_answers(flawless.answers, costs(20), max_candidates=7)
    assert speedup(narrow, chain(0)) == pytest.approx(8, rel=0.01)  # 7 candidates, and the late one after them


WINDOWED = DecodingConfig(policy="windowed", num_speculative_tokens=8)
ONE_PATH = {"fan_out": 2, "rows_per_step": 1}


@pytest.mark.parametrize(
    ("machine", "schedule", "expected", "within"),
    [
        (simulator(0.8, costs(10, delay=0.05)), synchronous(7), closed_forms.synchronous(0.8, 10, 7, 0.1), 0.01),
        # Without delay, and with c whole, every pass ends where a step begins: the rollback finds a step just begun.
        (simulator(0.6, costs(4), num_tokens=1200), chain(1), closed_forms.chain(0.6, 4, 1, restart_loss=1), 0.02),
        # A draft that has each window ready before the pass ends.
        (simulator(0.9, costs(17.3), num_tokens=1200), WINDOWED, closed_forms.windowed(0.9, 17.3, 8), 0.05),
        # One path, as long as the second guess is never right: a chain that waits for a verdict that is due.
        (simulator(0.9, costs(10), num_tokens=1200), branching(1, **ONE_PATH), closed_forms.chain(0.9, 10, 1), 0.02),
    ],
    ids=["synchronous", "chain", "windowed", "branching"],
)
def test_a_schedule_is_as_its_formula_has_it(
    machine: Simulator, schedule: DecodingConfig, expected: float, within: float
) -> None:
    assert speedup(machine, schedule) == pytest.approx(expected, rel=within)


class Failing(Policy):
    """A policy of a user's own, with a bug."""

    def decide(self, view: TargetView) -> Decision:
        raise KeyError("typo")


def failing(_decoding: DecodingConfig, *, can_branch: bool) -> Policy:
    return Failing()


def test_a_mistake_in_a_users_own_policy_ends_the_simulation_in_one_line() -> None:
    with pytest.raises(ConfigError, match=f"^policy={__name__}:failing: raises KeyError"):
        simulator(0.8, costs(5)).run(DecodingConfig(policy=f"{__name__}:failing"))


# Laws

times = st.integers(0, 20)
some = st.lists(times, min_size=1, max_size=3).map(tuple)
durations = st.builds(Duration, some, together=some)
positive = st.lists(st.integers(1, 60), min_size=1, max_size=3).map(tuple)
steps = st.builds(Duration, positive, together=positive)
OTHERS = ("host", "target_prefill", "draft_prefill", "advance", "rollback", "to_target", "to_draft")
passes = st.dictionaries(st.integers(0, 8), steps, min_size=1, max_size=3)
any_costs = st.builds(Costs, passes=passes, draft_token=steps, **dict.fromkeys(OTHERS, durations))
any_answers = st.lists(st.lists(st.booleans(), min_size=1, max_size=40).map(tuple), min_size=1, max_size=3).map(tuple)
any_schedule = st.one_of(
    st.just(PLAIN),
    st.integers(1, 9).map(synchronous),
    st.builds(
        lambda wait, extra: chain(wait, max_lookahead=wait + extra, max_wait_passes=1.0),
        st.integers(0, 6),
        st.integers(1, 10),
    ),
    st.builds(
        lambda wait, extra, fan_out, rows: branching(
            wait, max_lookahead=wait + extra, fan_out=fan_out, rows_per_step=rows, max_wait_passes=1.0
        ),
        st.integers(0, 4),
        st.integers(1, 10),
        st.integers(1, 4),
        st.integers(1, 8),
    ),
)


@given(any_costs, any_answers, any_schedule, st.integers(1, 6), st.integers(1, 9), st.integers(0, 3))
@settings(max_examples=100)
def test_every_token_and_every_nanosecond_is_accounted_for(
    costs: Costs, answers: tuple[Script, ...], decoding: DecodingConfig, batch_size: int, most: int, more_ns: int
) -> None:
    costs = replace(costs, sequence_ns=more_ns, draft_sequence_ns=more_ns, knee_rows=more_ns + 1)
    machine = of_answers(answers, costs, max_candidates=most, accept_next=0.4, batch_size=batch_size)
    outcome = machine.run(decoding)
    metrics = outcome.metrics
    assert [answer.num_tokens for answer in outcome.answers] == [len(answer) for answer in answers]
    own_tokens = sum(done.num_tokens - done.num_accepted for done in outcome.timeline.passes)
    assert metrics.num_tokens == metrics.num_accepted + own_tokens
    check_times(outcome, max(*costs.host.samples, *costs.host.together))
    check_fates(outcome)
    together = [sum(e.start_ns <= s.start_ns < e.end_ns for e in spans(outcome)) for s in spans(outcome)]
    assert max(together) <= batch_size
    # Every wrong token takes a pass to be found wrong, or to be overtaken, where the draft tries its own token first.
    if machine.num_slots == 1 and (decoding.policy == "chain" or machine.accept >= 0.5):
        assert metrics.num_passes >= sum(not right for answer in answers for right in answer)
    assert outcome == machine.run(decoding)


def check_times(outcome: Outcome, longest_host_ns: int) -> None:
    """Each worker does one thing at a time; the time of an answer is that of its work and of the host."""
    work = spans_of(outcome.timeline.target, "target_prefill", "target_pass", "target_wait")
    drafting = spans_of(outcome.timeline.draft, "draft_prefill", "draft_step", "advance", "rollback", "draft_wait")
    for times in (work, drafting):
        assert all(before[1] <= after[0] for before, after in pairwise(times))
    for answer, span in zip(outcome.answers, spans(outcome), strict=True):
        inside = [end - start for start, end in work if span.start_ns <= start and end <= span.end_ns]
        assert 0 <= answer.total_ns - sum(inside) <= longest_host_ns * len(inside)
        assert answer.prefill_ns + answer.pass_ns + answer.wait_ns <= sum(inside)
        if answer.draft is not None:
            assert answer.draft.open_ns >= answer.draft.busy_ns


def spans(outcome: Outcome) -> list[Event]:
    """The span of each answer, from its opening to its last token, in the order of the answers."""
    found = [event for event in outcome.timeline.target if event.name == "sequence"]
    return sorted(found, key=lambda event: event.sequence_id)


def spans_of(events: Sequence[Event], *names: str) -> list[tuple[int, int]]:
    """The times at which a worker did these things; work for several sequences at once counts once."""
    return sorted({(event.start_ns, event.end_ns) for event in events if event.name in names})


def check_fates(outcome: Outcome) -> None:
    parts = outcome.timeline.by_sequence()
    for number, answer in enumerate(outcome.answers, start=1):
        part = parts[number]
        if answer.draft is None:
            assert not part.draft
            continue
        assert sum(event.name == "rollback" for event in part.draft) == answer.draft.num_rollbacks
        if part.has_tree:
            continue
        fates = [fates for _, fates in part.steps()]
        assert sum(sum(found.values()) for found in fates) == answer.draft.num_drafted
        assert sum(found["accepted"] for found in fates) == answer.num_accepted


@given(st.floats(0.4, 1), st.floats(0, 0.6), st.floats(1.5, 12), st.floats(0, 0.3), any_schedule)
@settings(max_examples=25)
def test_no_schedule_exceeds_the_bound_of_one_path(
    a: float, accept_next: float, c: float, delay: float, decoding: DecodingConfig
) -> None:
    """Rows of a tree do not lift it, even where they are free.

    1 / (1 - a): a pass judges one path, along the first guesses (which a >= (1 - a) accept_next makes the likeliest),
    so every wrong one takes a pass. c / a: nodes of one step never follow each other, since the guesses after a node
    are known only once it is computed. So a step extends the text by one token at most, however many rows it has, and c
    is counted in steps of one row, the cheapest.
    """
    machine = replace(simulator(a, costs(c, delay=delay), num_tokens=150), accept_next=accept_next)
    assert speedup(machine, decoding) <= closed_forms.upper_bound(machine.accept, c) * 1.02
