"""The schedules, as functions of what they may look at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from amusd.config import DecodingConfig
from amusd.policies.base import TargetView, Verify, Wait
from amusd.policies.chain import ChainPolicy
from amusd.policies.factory import make_policy
from amusd.policies.lockstep import AutoregressivePolicy, SynchronousPolicy
from amusd.types import Mode

VIEW = TargetView(
    num_candidates=0, max_candidates=7, may_get_more=True, draft_restarting=False, waited_seconds=0.0, pass_seconds=0.02
)
CHAIN = ChainPolicy(max_lookahead=16, tokens_per_message=1, min_candidates=3, max_wait_passes=1.0)
SYNCHRONOUS = SynchronousPolicy(4, timeout_seconds=2.0)


def test_the_chain_verifies_what_has_arrived() -> None:
    for num_candidates in range(5):
        assert CHAIN.decide(replace(VIEW, num_candidates=num_candidates)) == Verify(num_candidates)


def test_the_chain_waits_for_a_draft_that_starts_anew_until_enough_has_arrived() -> None:
    restarting = replace(VIEW, draft_restarting=True)
    assert CHAIN.decide(restarting) == Wait(0.02)
    assert CHAIN.decide(replace(restarting, num_candidates=2)) == Wait(0.02)
    assert CHAIN.decide(replace(restarting, num_candidates=3)) == Verify(3)


def test_the_chain_waits_no_longer_than_a_pass_takes() -> None:
    restarting = replace(VIEW, draft_restarting=True, num_candidates=1)
    assert CHAIN.decide(replace(restarting, waited_seconds=0.015)) == Wait(pytest.approx(0.005))  # type: ignore[arg-type]
    assert CHAIN.decide(replace(restarting, waited_seconds=0.02)) == Verify(1)
    assert CHAIN.decide(replace(restarting, pass_seconds=0.0)) == Verify(1)


def test_the_chain_does_not_wait_for_what_cannot_come() -> None:
    restarting = replace(VIEW, draft_restarting=True)
    assert CHAIN.decide(replace(restarting, may_get_more=False)) == Verify(0)
    assert CHAIN.decide(replace(restarting, max_candidates=1, num_candidates=1)) == Verify(1)
    assert replace(CHAIN, min_candidates=0).decide(restarting) == Verify(0)


def test_the_synchronous_target_waits_for_the_whole_block_or_the_drafts_word() -> None:
    assert SYNCHRONOUS.decide(replace(VIEW, num_candidates=3)) == Wait(2.0)
    assert SYNCHRONOUS.decide(replace(VIEW, num_candidates=4)) == Verify(4)
    assert SYNCHRONOUS.decide(replace(VIEW, num_candidates=3, may_get_more=False)) == Verify(3)
    assert SYNCHRONOUS.decide(replace(VIEW, num_candidates=2, max_candidates=2)) == Verify(2)


def test_the_synchronous_target_goes_on_alone_after_its_deadline() -> None:
    assert SYNCHRONOUS.decide(replace(VIEW, waited_seconds=2.0)) == Verify(0)


def test_the_plain_target_never_waits() -> None:
    assert AutoregressivePolicy().decide(replace(VIEW, draft_restarting=True, num_candidates=5)) == Verify(0)


def test_each_mode_has_its_policy() -> None:
    assert isinstance(make_policy(DecodingConfig(mode=Mode.AUTOREGRESSIVE)), AutoregressivePolicy)
    synchronous = make_policy(DecodingConfig(mode=Mode.SYNCHRONOUS, num_speculative_tokens=5))
    assert (synchronous.max_lookahead, synchronous.tokens_per_message) == (5, 5)
    assert make_policy(DecodingConfig(max_lookahead=9)).max_lookahead == 9
