"""Wall time and its parts: they add up, and agree with what the workers counted themselves."""

from __future__ import annotations

import pytest
from tracing.runs import Run, made

from amusd.tracing.accounting import TARGET_PARTS, accounts
from amusd.tracing.drafted import Fate, judge_steps

CLOSE = 0.01
"""Parts add up to the wall time within this share."""


def test_a_real_runs_parts_add_up_and_agree_with_the_metrics(real_run: Run) -> None:
    for answer in real_run.answers:
        part = real_run.timeline.only(answer.sequence_id)
        found = accounts(part.target, part.draft)
        metrics = answer.metrics
        target = found["target"]
        assert sum(target.values()) == pytest.approx(metrics.total_ns, rel=CLOSE)
        assert min(target.values()) >= 0
        assert sum(target[name] for name in TARGET_PARTS if "passes" in name) == metrics.pass_ns
        assert target["waits"] == metrics.wait_ns
        assert target["prefill"] == metrics.prefill_ns
        assert ("draft" in found) == (metrics.draft is not None)
        if metrics.draft is not None:
            draft = found["draft"]
            # The sequence is open a little longer than until its last report.
            assert metrics.draft.open_ns <= sum(draft.values()) < metrics.draft.open_ns + 100_000_000
            busy = sum(part for name, part in draft.items() if name not in ("waits", "host"))
            assert busy == metrics.draft.busy_ns
            assert draft["waits"] == metrics.draft.wait_ns
            assert min(draft["accepted_steps"], draft["wasted_steps"]) > 0
            steps = judge_steps(part.draft, part.target)
            assert sum(step.count(Fate.ACCEPTED) for step in steps) == metrics.num_accepted
            assert sum(len(step.fates) for step in steps) == metrics.draft.num_drafted


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
    fates = [step.fates for step in judge_steps(draft, target)]
    assert fates == [(Fate.OVERTAKEN, Fate.ACCEPTED, Fate.WASTED), (Fate.WASTED,)]


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
        made("sequence", 6, 10, 1),
    ]
    target = [made("target_pass", 0, 8, 1, committed_length=5, num_tokens=1, num_accepted=1)]
    assert [step.fates for step in judge_steps(draft, target)] == [(Fate.WASTED, Fate.WASTED), (Fate.ACCEPTED,)]
    assert sum(accounts(target, draft)["draft"].values()) == 10
