"""Drafts that are killed or stopped, in real processes: every token exact, and a draft again."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import psutil
import pytest
from runtime.draft_processes import NUM_TOKENS, survivor
from runtime.pair import decoding

from amusd.runtime import patience

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="shared memory links and /proc are Linux's"
)

KINDS = ("shared_memory", "zeromq")
SCHEDULES = (
    decoding("asynchronous", 4, policy="chain"),
    decoding("synchronous", 4, max_silence_seconds=0.3),
    decoding("asynchronous", 4, policy="branching"),
    decoding("asynchronous", 4, policy="auto"),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_cycles", [4, pytest.param(500, marks=[pytest.mark.long, pytest.mark.timeout(3000)])])
def test_a_draft_that_is_killed_again_and_again_costs_no_token(links_folder: Path, kind: str, num_cycles: int) -> None:
    """The moments are random, the next draft's start among them; nothing is left of a killed one."""
    chance = random.Random(f"{kind} {num_cycles}")
    with survivor(kind) as pair:
        pair.await_help(SCHEDULES[0])
        before = psutil.Process().num_fds()
        for cycle in range(num_cycles):
            schedule = SCHEDULES[chance.randrange(len(SCHEDULES))]
            pair.answer(schedule, chance.randrange(NUM_TOKENS), pair.kill)
            if cycle % 3:  # else the next one may be killed while it starts
                pair.await_help(schedule)
        pair.await_help(SCHEDULES[0])
        assert psutil.Process().num_fds() == before
        assert pair.engine.draft.failure is None
        assert len(pair.engine.draft.losses) >= num_cycles / 2
        assert pair.engine.draft.num_restarts >= num_cycles / 2
    assert list(links_folder.iterdir()) == []


def test_a_stopped_draft_is_waited_for_once_and_used_again_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline for a block is ten seconds, so the test would time out if the target waited for each."""
    monkeypatch.setattr(patience, "SILENCES", 1000)  # it is not replaced, however long the answers take
    with survivor("shared_memory") as pair:
        pair.await_help(SCHEDULES[1])
        stopped = pair.answer(SCHEDULES[1], 5, lambda: psutil.Process(pair.pid).suspend()).generation
        alone = pair.answer(SCHEDULES[1]).generation
        assert pair.engine.draft.presence == "silent"
        psutil.Process(pair.pid).resume()
        pair.await_help(SCHEDULES[1])
        assert pair.engine.draft.presence == "present"
        assert pair.engine.draft.losses == []
    assert stopped.metrics.num_tokens_alone > NUM_TOKENS / 2
    assert (alone.metrics.num_tokens_alone, alone.metrics.wait_ns) == (NUM_TOKENS, 0)
