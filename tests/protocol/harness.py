"""Drives the two sessions of a chain, with a ghost record of what every candidate was drafted from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.schedule import VOCAB_SIZE, Schedule, Violation, oracle_token

from amusd.protocol.draft_session import DraftSession, Transition
from amusd.protocol.messages import Candidate, Open
from amusd.protocol.target_session import Reception, TargetSession
from amusd.sampling.equality import Acceptance, accept_equal

Ghosts = list[tuple[int, ...]]
"""Of each candidate of a message: the prefix that it was drafted from."""


@dataclass
class Harness(Schedule[Candidate, Ghosts]):
    """See `Schedule`."""

    target_class: type[TargetSession] = TargetSession
    draft_class: type[DraftSession] = DraftSession
    num_rollbacks: int = 0

    def new_target(self, **options: Any) -> TargetSession:
        self.drafted_from: dict[int, tuple[int, ...]] = {}
        self.block: tuple[int, ...] = ()
        return self.target_class(**options)

    def new_draft(self, **opening: Any) -> DraftSession:
        self.ghosts: dict[int, tuple[int, ...]] = {}
        draft = self.draft_class(Open(**opening, tokens_per_message=self.random.randint(1, 3)))
        self.epoch_before = draft.epoch
        return draft

    @property
    def own_actions(self) -> Sequence[Callable[[], None]]:
        return (self.propose,)

    def propose(self) -> None:
        room = self.draft.room
        if not room:
            return
        tokens: list[int] = []
        for _ in range(0 if self.random.random() < self.faults.silent else self.random.randint(1, room)):
            right = oracle_token((*self.draft.token_ids, *tokens))
            wrong = (right + self.random.randint(1, VOCAB_SIZE - 1)) % VOCAB_SIZE
            self.drafted_from[self.draft.length + len(tokens)] = (*self.draft.token_ids, *tokens)
            tokens.append(right if self.random.random() < self.faults.right else wrong)
        self.draft.extend(tokens)

    def work(self) -> None:
        while self.draft.room:
            self.propose()

    def prepared(self) -> tuple[Candidate, Ghosts] | None:
        candidate = self.draft.offer()
        if candidate is None:
            return None
        return candidate, [self.drafted_from[candidate.start + offset] for offset in range(len(candidate.token_ids))]

    def taken(self, message: Candidate, origin: Ghosts, reception: Reception) -> None:
        if reception is Reception.TAKEN:
            self.ghosts.update((message.start + offset, ghost) for offset, ghost in enumerate(origin))

    def heard(self, change: Transition) -> None:
        if change.num_discarded and self.draft.epoch == self.epoch_before:
            raise Violation("R2: tokens were thrown away and the epoch did not rise")
        self.num_rollbacks += change.num_discarded > 0

    def verify(self) -> None:
        self.block = self.target.begin(self.random.randint(0, self.max_lookahead)).candidates
        prefix = self.target.committed
        for offset, token_id in enumerate(self.block):
            self._check_ghost(len(prefix) + offset, (*prefix, *self.block[:offset]), token_id)

    def judge(self) -> Acceptance:
        prefix = self.target.committed
        choices = [oracle_token((*prefix, *self.block[:offset])) for offset in range(len(self.block) + 1)]
        judged = self.target.candidates_to_judge()
        if len(judged) > len(self.block):
            self._check_ghost(len(prefix) + len(self.block), (*prefix, *self.block), judged[-1])
        return accept_equal(choices, judged)

    def check(self) -> None:
        super().check()
        if self.draft.epoch < self.epoch_before:
            raise Violation("I3: the draft's epoch went back")
        self.epoch_before = self.draft.epoch
        base = self.draft.base
        if self.draft.token_ids[:base] != self.target.committed[:base]:
            raise Violation("I4: the draft's base is not a committed prefix")
        if self.draft.length - base > self.max_lookahead:
            raise Violation("R1: the draft runs too far ahead")

    def _check_ghost(self, position: int, prefix: tuple[int, ...], token_id: int) -> None:
        ghost = self.ghosts.get(position)
        if ghost != prefix:
            raise Violation(f"I6: token {token_id} at {position} was drafted from {ghost}, is judged behind {prefix}")
