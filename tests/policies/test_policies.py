"""The schedules, as functions of what they may look at."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
from policies.builders import outcome

from amusd.config import DecodingConfig
from amusd.policies.base import TargetView, Verify, Wait
from amusd.policies.estimates import Estimates
from amusd.policies.factory import make_policy, policy_name
from amusd.policies.schedules import AutoPolicy, ContinuousPolicy, SynchronousPolicy, WindowedPolicy
from amusd.types import Mode

VIEW = TargetView(
    num_candidates=0, max_candidates=7, may_get_more=True, draft_restarting=False, waited_seconds=0.0, pass_seconds=0.02
)
CHAIN = ContinuousPolicy(max_lookahead=16, tokens_per_message=1, min_candidates=3, max_wait_passes=1.0)
SYNCHRONOUS = SynchronousPolicy(max_lookahead=4, tokens_per_message=4, timeout_seconds=2.0)


def test_the_chain_waits_for_a_draft_that_starts_anew_until_enough_has_arrived_or_a_pass_could_have_ended() -> None:
    assert CHAIN.decide(replace(VIEW, num_candidates=2)) == Verify(2)
    restarting = replace(VIEW, draft_restarting=True)
    assert CHAIN.decide(replace(restarting, num_candidates=2)) == Wait(0.02)
    assert CHAIN.decide(replace(restarting, num_candidates=3)) == Verify(3)
    assert CHAIN.decide(replace(restarting, waited_seconds=0.015)) == Wait(pytest.approx(0.005))  # type: ignore[arg-type]
    assert CHAIN.decide(replace(restarting, waited_seconds=0.02)) == Verify(0)
    assert CHAIN.decide(replace(restarting, may_get_more=False)) == Verify(0)
    assert CHAIN.decide(replace(restarting, max_candidates=1, num_candidates=1)) == Verify(1)
    assert replace(CHAIN, min_candidates=0).decide(restarting) == Verify(0)


def test_the_synchronous_target_waits_for_the_whole_block_or_the_drafts_word() -> None:
    assert SYNCHRONOUS.decide(replace(VIEW, num_candidates=3)) == Wait(2.0)
    assert SYNCHRONOUS.decide(replace(VIEW, num_candidates=4)) == Verify(4)
    assert SYNCHRONOUS.decide(replace(VIEW, num_candidates=3, may_get_more=False)) == Verify(3)
    assert SYNCHRONOUS.decide(replace(VIEW, num_candidates=2, max_candidates=2)) == Verify(2)
    assert SYNCHRONOUS.decide(replace(VIEW, waited_seconds=2.0)) == Verify(0)


WINDOWED = WindowedPolicy(max_lookahead=8, tokens_per_message=4, timeout_seconds=2.0)


def test_windows_are_verified_whole_and_waited_for() -> None:
    assert WINDOWED.decide(VIEW) == Wait(2.0)
    assert WINDOWED.decide(replace(VIEW, num_candidates=3)) == Verify(3)  # the first of four was judged late
    assert WINDOWED.decide(replace(VIEW, num_candidates=7)) == Verify(4)
    assert WINDOWED.decide(replace(VIEW, waited_seconds=2.0)) == Verify(0)
    assert WINDOWED.decide(replace(VIEW, may_get_more=False)) == Verify(0)
    assert WINDOWED.decide(replace(VIEW, draft_restarting=True)) == Verify(0)


BRANCHING = replace(CHAIN, fan_out=4, rows_per_step=8, min_candidates=2, always_waits=True)
AUTO = AutoPolicy(max_lookahead=16, fan_out=4, rows_per_step=8, max_wait_passes=1.0)
KNOWN = replace(VIEW, acceptance=0.6, tokens_per_second=50.0, candidate_seconds=0.005)
"""A candidate more has to bring a quarter of a token."""


def test_branching_verifies_a_path_that_is_long_enough_and_waits_for_the_rest_of_one_that_is_not() -> None:
    assert BRANCHING.decide(replace(VIEW, num_candidates=2)) == Verify(2)
    short = replace(VIEW, num_candidates=1)
    assert BRANCHING.decide(short) == Wait(0.02)
    for changes in ({"may_get_more": False}, {"waited_seconds": 0.02}, {"max_candidates": 1}):
        assert BRANCHING.decide(replace(short, **changes)) == Verify(1)


def test_auto_waits_while_a_candidate_more_brings_more_than_it_costs() -> None:
    assert AUTO.decide(KNOWN) == Wait(0.02)  # 0.6 of a token
    assert AUTO.decide(replace(KNOWN, num_candidates=1, chances=(0.6,))) == Wait(0.02)  # 0.36
    assert AUTO.decide(replace(KNOWN, num_candidates=2, chances=(0.6, 0.36))) == Verify(2)  # 0.22
    assert AUTO.decide(replace(KNOWN, num_candidates=1, chances=(0.4,))) == Verify(1)  # not sure of it: 0.24
    assert AUTO.decide(replace(KNOWN, acceptance=0.2)) == Verify(0)


def test_auto_waits_for_less_where_what_the_draft_has_begun_is_a_start_for_the_next_pass() -> None:
    one = replace(KNOWN, num_candidates=1, chances=(0.6,))
    assert AUTO.decide(replace(one, lead_gain=0.3)) == Wait(0.02)  # 0.36 for 0.25 and 0.6 of a half of 0.3, 0.34
    assert AUTO.decide(replace(one, lead_gain=0.4)) == Verify(1)  # for 0.37
    assert AUTO.decide(replace(KNOWN, lead_gain=0.9)) == Wait(0.02)  # no node to verify has a lead


def test_auto_verifies_what_is_worth_its_row() -> None:
    at_hand = replace(KNOWN, num_candidates=3, chances=(0.6, 0.3, 0.1), may_get_more=False)
    assert AUTO.decide(at_hand) == Verify(3)
    assert AUTO.decide(replace(at_hand, row_seconds=0.004)) == Verify(2, min_chance=0.2)  # a fifth of a token
    faster_alone = replace(at_hand, row_seconds=0.004, plain_tokens_per_second=100.0)
    assert AUTO.decide(faster_alone) == Verify(1, min_chance=0.4)
    assert AUTO.decide(replace(at_hand, row_seconds=0.02)) == Verify(0, min_chance=1.0)  # no better than decoding alone
    assert AUTO.decide(replace(KNOWN, row_seconds=0.006)) == Wait(0.02)  # 0.25 and 0.3 of a token for 0.6
    assert AUTO.decide(replace(KNOWN, row_seconds=0.008)) == Verify(0, min_chance=0.4)


def test_auto_says_what_a_wait_is_worth_beside_other_sequences() -> None:
    assert AUTO.decide(KNOWN).worth == pytest.approx(0.6 - 0.25)
    assert AUTO.decide(replace(KNOWN, acceptance=0.2)).worth == pytest.approx(0.2 - 0.25)
    of_none = [{"row_seconds": 0.02}, {"may_get_more": False}, {"drafting_pays": False}, {"waited_seconds": 0.02}]
    for changes in of_none:  # no more is lost than the time
        assert AUTO.decide(replace(KNOWN, **changes)).worth == pytest.approx(-0.25)


def test_auto_has_the_draft_rest_where_drafting_does_not_pay() -> None:
    resting = replace(KNOWN, num_candidates=2, chances=(0.6, 0.3), drafting_pays=False, plain_tokens_per_second=52.0)
    assert AUTO.decide(resting) == Verify(0, sends_verdict=False)
    assert AUTO.decide(resting).reason == "drafting is paused: 50.0 tokens/s with the draft, 52.0 without"
    trial = replace(resting, plain_tokens_per_second=40.0)
    assert AUTO.decide(trial).reason == "a pause is tried: 50.0 tokens/s with the draft, 40.0 without"


def test_auto_waits_for_nothing_that_cannot_come_and_no_longer_than_a_pass_or_thrice_as_usual() -> None:
    for changes in ({"may_get_more": False}, {"max_candidates": 0}, {"waited_seconds": 0.02}):
        assert AUTO.decide(replace(KNOWN, **changes)) == Verify(0)
    assert AUTO.decide(replace(KNOWN, longest_wait=0.015)) == Wait(0.015)
    assert AUTO.decide(replace(KNOWN, longest_wait=0.015, waited_seconds=0.012)) == Wait(pytest.approx(0.008))  # type: ignore[arg-type]
    assert AUTO.decide(replace(KNOWN, waited_in_vain=True)) == Verify(0)


def passed(estimates: Estimates, num_judged: int, num_accepted: int, view: TargetView = KNOWN) -> None:
    estimates.on_pass(outcome(num_judged, num_accepted), 0.04, view)


def judged_first(estimates: Estimates, weight: float, *, accepted: bool) -> None:
    passed(estimates, 1, int(accepted), replace(KNOWN, weights=(weight,)))


def test_the_longest_wait_is_thrice_the_usual_one() -> None:
    estimates = Estimates()
    assert estimates.waits(0).longest_seconds == estimates.waits(3).longest_seconds == math.inf
    for _ in range(50):
        estimates.waits(0).on_wait(0.004, came=True)
        estimates.waits(3).on_wait(0.0, came=True)
        estimates.waits(3).on_wait(0.002, came=True)
    assert estimates.waits(0).longest_seconds == pytest.approx(0.012)
    assert estimates.waits(3).longest_seconds == pytest.approx(0.006)


def test_acceptance_counts_what_was_tested_and_forgets_slowly() -> None:
    estimates = Estimates()
    assert estimates.acceptance.value == 0.5
    for _ in range(400):
        passed(estimates, 5, 1)
    assert estimates.acceptance.value == pytest.approx(0.5)  # one accepted, one tested and rejected, three unknown
    assert estimates.tokens_per_second.value == pytest.approx(50.0)
    for _ in range(400):
        passed(estimates, 4, 4)
    passed(estimates, 0, 0)
    assert estimates.acceptance.value > 0.99


def test_waits_in_vain_make_a_candidate_dear_until_they_are_forgotten() -> None:
    estimates = Estimates()
    assert estimates.waits(0).candidate_seconds == 0
    for step in (0.3, 0.01, 0.02):  # a stall is no step
        estimates.on_step(step)
    assert estimates.waits(0).candidate_seconds == pytest.approx(0.01), "all of a step, before there was any wait"
    assert estimates.waits(3).candidate_seconds == pytest.approx(0.005), "half of one on average"
    for _ in range(50):
        estimates.waits(0).on_wait(0.04, came=False)
    assert estimates.waits(0).candidate_seconds > 1
    for _ in range(600):
        passed(estimates, 0, 0)
    assert estimates.waits(0).candidate_seconds == pytest.approx(0.01, rel=0.01)


def test_one_stall_of_the_machine_does_not_end_all_waiting() -> None:
    estimates = Estimates()
    for _ in range(20):
        estimates.waits(0).on_wait(0.006, came=True)
    estimates.waits(0).on_wait(0.3, came=True)
    assert 0.006 < estimates.waits(0).candidate_seconds < 0.008
    for _ in range(12):  # it was none: the draft has become slow
        estimates.waits(0).on_wait(0.3, came=True)
    assert estimates.waits(0).candidate_seconds > 0.04


def test_the_chances_are_what_the_draft_says_corrected_by_what_came_of_it() -> None:
    estimates = Estimates()
    assert estimates.chances(0, ()) == ()
    assert estimates.chances(2, ()) == (0.5, 0.25)
    assert estimates.chances(2, (0.8, 0.5)) == pytest.approx((0.8, 0.4))
    for number in range(1000):
        judged_first(estimates, 0.8, accepted=number % 2 == 0)
    assert estimates.chances(2, (0.8, 0.5)) == pytest.approx((0.5, 0.4 * (0.5 / 0.8) ** 2), rel=0.05)
    for _ in range(1000):
        judged_first(estimates, 0.5, accepted=True)
    assert estimates.chances(1, (0.9,)) == pytest.approx((0.9,))  # never more than the draft says


def test_each_mode_has_its_policy() -> None:
    assert make_policy(DecodingConfig(mode="autoregressive")).decide(replace(VIEW, num_candidates=3)) == Verify(0)
    synchronous = make_policy(DecodingConfig(mode="synchronous", num_speculative_tokens=5))
    assert (synchronous.max_lookahead, synchronous.tokens_per_message) == (5, 5)
    chain = make_policy(DecodingConfig(policy="chain", max_lookahead=9), can_branch=True)
    assert isinstance(chain, ContinuousPolicy)
    assert not chain.always_waits
    assert chain.fan_out == 1
    windowed = make_policy(DecodingConfig(policy="windowed", num_speculative_tokens=6))
    assert (windowed.max_lookahead, windowed.tokens_per_message) == (12, 6)
    branching = make_policy(DecodingConfig(policy="branching", fan_out=3, rows_per_step=5), can_branch=True)
    assert isinstance(branching, ContinuousPolicy)
    assert (branching.fan_out, branching.rows_per_step, branching.always_waits) == (3, 5, True)
    assert make_policy(DecodingConfig(), can_branch=True).fan_out == DecodingConfig.fan_out
    assert make_policy(DecodingConfig(), can_branch=False).fan_out == 1
    assert [policy_name(DecodingConfig(mode=mode)) for mode in get_args(Mode)] == [
        "auto" if mode == "asynchronous" else None for mode in get_args(Mode)
    ]
