"""A run over trees: its times add up, its tokens are counted once, and the trace shows what happened."""

from __future__ import annotations

import pytest
from tracing.runs import Run, made, named

from amusd.tracing.drafted import Fate, accepted_positions, judge_steps
from amusd.tracing.timeline import Timeline

SEQUENCES = [1, 2]


def accepted_at_the_end(part: Timeline) -> int:
    """By the passes that the draft heard nothing of before the sequence was closed: the last one, sometimes more."""
    heard = max(e.committed_length for e in (*named(part.draft, "advance"), *named(part.draft, "rollback")))
    return sum(e.num_accepted for e in named(part.target, "target_pass") if e.committed_length > heard)


@pytest.mark.parametrize("sequence_id", SEQUENCES)
def test_every_accepted_candidate_is_found_in_the_step_that_guessed_it(branching_run: Run, sequence_id: int) -> None:
    part = branching_run.timeline.only(sequence_id)
    metrics = branching_run.answers[sequence_id - 1].metrics
    steps = judge_steps(part.draft, part.target)
    assert metrics.draft is not None
    assert len(steps) == metrics.draft.num_steps
    assert sum(len(step.fates) for step in steps) == metrics.draft.num_drafted
    assert sum(step.count(Fate.ACCEPTED) for step in steps) == metrics.num_accepted - accepted_at_the_end(part) > 0
    # What was foreseen where the target chose another candidate first is right as well.
    kept = sum(len(event.fields.get("kept_steps", ())) for event in part.draft)
    assert sum(step.count(Fate.ACCEPTED) + step.count(Fate.OVERTAKEN) for step in steps) == kept
    assert kept > metrics.num_accepted - accepted_at_the_end(part)


def test_a_token_counts_in_its_own_step_and_what_was_looked_up_in_none() -> None:
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
    assert accepted_positions(target) == {4, 5, 6, 8}
    fates = [step.fates for step in judge_steps(draft, target)]
    assert fates == [
        (Fate.ACCEPTED,),
        (Fate.ACCEPTED, Fate.OVERTAKEN, Fate.WASTED),
        (Fate.ACCEPTED, Fate.WASTED),
    ]
