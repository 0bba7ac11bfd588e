"""Stream, cache and drafter state go back together, or not at all."""

from __future__ import annotations

import pytest
from runtime.pair import PROMPT, VOCAB_SIZE, target_model

from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.errors import PeerProtocolError, RollbackError
from amusd.protocol.messages import Open, Verdict
from amusd.runtime.rollback import RollbackManager


class BrittleDrafter(AutoregressiveDrafter):
    """Fails in a method when told to, after having done half of its work."""

    fail_in = ""

    def truncate(self, length: int) -> None:
        super().truncate(length)
        if self.fail_in == "truncate":
            raise RuntimeError("device lost")

    def commit(self, token_ids: tuple[int, ...]) -> None:  # type: ignore[override]  # always a tuple here
        super().commit(token_ids[:1])
        if self.fail_in == "commit":
            raise RuntimeError("device lost")
        super().commit(token_ids[1:])


def manager_with_tail(num_drafted: int = 4) -> RollbackManager:
    manager = RollbackManager(Open(1, 1, PROMPT, 100, "brittle", 8, 1), BrittleDrafter(target_model()))
    while manager.session.length < len(PROMPT) + num_drafted:
        manager.propose()
    return manager


def contradiction(manager: RollbackManager) -> Verdict:
    first = manager.session.token_ids[len(PROMPT)]
    return Verdict(1, 1, 1, len(PROMPT), (first, (manager.session.token_ids[len(PROMPT) + 1] + 1) % VOCAB_SIZE), 1)


@pytest.mark.parametrize("fail_in", ["truncate", "commit"])
def test_a_drafter_that_fails_halfway_leaves_everything_as_it_was(fail_in: str) -> None:
    manager = manager_with_tail()
    before = (manager.session.token_ids, manager.session.epoch, manager.session.base, manager.session.room)
    proposed_before = manager_with_tail(6).session.token_ids[len(PROMPT) + 4 :]
    manager.drafter.fail_in = fail_in  # type: ignore[attr-defined]  # a BrittleDrafter
    with pytest.raises(RollbackError, match="could not follow"):
        manager.apply(contradiction(manager))
    assert (manager.session.token_ids, manager.session.epoch, manager.session.base, manager.session.room) == before
    assert manager.drafter.length == manager.session.length
    assert manager.propose() + manager.propose() == len(proposed_before)
    assert manager.session.token_ids[len(PROMPT) + 4 :] == proposed_before


def test_after_a_failure_the_same_verdict_can_be_applied() -> None:
    manager = manager_with_tail()
    verdict = contradiction(manager)
    manager.drafter.fail_in = "truncate"  # type: ignore[attr-defined]
    with pytest.raises(RollbackError):
        manager.apply(verdict)
    manager.drafter.fail_in = ""  # type: ignore[attr-defined]
    transition = manager.apply(verdict)
    assert transition is not None
    assert manager.session.token_ids == (*PROMPT, *verdict.token_ids)


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(1, 1, 0, len(PROMPT) + 3, (1, 2), 0),
        Verdict(1, 1, 0, 0, (9, 9, 9, 9, 9, 9), 0),
        Verdict(1, 1, 0, len(PROMPT), (1,) * 96, 0),
    ],
    ids=["behind a gap", "changes the prompt", "beyond the limit"],
)
def test_an_impossible_verdict_is_refused_and_changes_nothing(verdict: Verdict) -> None:
    manager = manager_with_tail()
    before = (manager.session.token_ids, manager.session.epoch, manager.session.base)
    with pytest.raises(PeerProtocolError):
        manager.apply(verdict)
    assert (manager.session.token_ids, manager.session.epoch, manager.session.base) == before
    assert manager.drafter.length == manager.session.length


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(1, 1, 0, len(PROMPT), (), 0),
        Verdict(1, 2, 0, len(PROMPT), (1,), 0),
        Verdict(2, 1, 0, len(PROMPT), (1,), 0),
    ],
    ids=["nothing new", "another incarnation", "another sequence"],
)
def test_a_stale_verdict_is_counted_and_ignored(verdict: Verdict) -> None:
    manager = manager_with_tail()
    before = manager.session.token_ids
    assert manager.apply(verdict) is None
    assert manager.session.token_ids == before
    assert manager.session.num_stale == 1


def test_a_disagreement_is_reported_with_both_lengths() -> None:
    manager = manager_with_tail()
    manager.drafter.truncate(len(PROMPT))
    with pytest.raises(RollbackError, match=f"drafter holds {len(PROMPT) + 1} tokens, session {len(PROMPT) + 5}"):
        manager.propose()
