"""Drives the two real sessions through a random schedule, with a ghost record of what every candidate was drafted from.

The oracle is a function from a prefix to the target's next token. After every step the harness checks the invariants of
docs/protocol.md; `Violation` names the one that broke.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from protocol.channel import Channel

from amusd.errors import AmusdError
from amusd.protocol import prefix_hash
from amusd.protocol.draft_session import DraftSession
from amusd.protocol.messages import Candidate, Open, Verdict
from amusd.protocol.target_session import Reception, TargetSession
from amusd.sampling.equality import accept_equal

VOCAB_SIZE = 5


class Violation(AssertionError):  # noqa: N818 - a finding, not an error of the harness
    """An invariant does not hold."""


def oracle_token(prefix: tuple[int, ...]) -> int:
    """The target's next token: depends on the whole prefix."""
    value = prefix_hash.EMPTY
    for token_id in prefix:
        value = prefix_hash.extend(value, token_id)
    return value % VOCAB_SIZE


def oracle_text(prompt: tuple[int, ...], max_length: int) -> tuple[int, ...]:
    """What plain decoding writes."""
    text = prompt
    while len(text) < max_length:
        text = (*text, oracle_token(text))
    return text


@dataclass(frozen=True)
class Faults:
    """What may go wrong on the way, as probabilities per step."""

    lose: float = 0.0
    duplicate: float = 0.0
    restart: float = 0.0
    vanish: float = 0.0
    """The draft is gone and the target knows; it comes back, as a new life, with probability `restart`."""
    right: float = 0.7
    """How often the draft proposes the target's own token."""
    silent: float = 0.1
    """How often the drafter has nothing to propose."""


@dataclass
class Harness:
    """One sequence between a target and a draft session, and the two channels between them."""

    seed: int
    faults: Faults = field(default_factory=Faults)
    max_length: int = 40
    max_lookahead: int = 6
    target_class: type[TargetSession] = TargetSession
    draft_class: type[DraftSession] = DraftSession
    num_accepted: int = 0
    num_rollbacks: int = 0
    num_returns: int = -1
    """Lives of the draft behind the first."""
    num_alone: int = 0
    """Tokens committed while there was no draft."""
    receptions: list[Reception] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.prompt = tuple(self.random.randrange(VOCAB_SIZE) for _ in range(self.random.randint(1, 4)))
        self.target = self.target_class(
            sequence_id=1,
            prompt=self.prompt,
            max_length=self.max_length,
            vocab_size=VOCAB_SIZE,
            max_lookahead=self.max_lookahead,
        )
        self.incarnation = 0
        self.to_target = Channel[tuple[Candidate, list[tuple[int, ...]]]](self.random)
        self.drafted_from: dict[int, tuple[int, ...]] = {}
        self.to_draft = Channel[Verdict](self.random)
        self.ghosts: dict[int, tuple[int, ...]] = {}
        self.block: tuple[int, ...] | None = None
        self.committed_before = self.prompt
        self.restart_draft()

    # Actions

    def lose_draft(self) -> None:
        """The target goes on alone; what the draft sent may still arrive."""
        self.target.detach()
        self.to_draft.clear()

    def restart_draft(self) -> None:
        """A draft (again): what was on its way to the old one is lost, what it sent may still arrive."""
        self.incarnation += 1
        self.target.attach(self.incarnation)
        self.num_returns += 1
        self.ghosts = {}
        self.to_draft.clear()
        opening = Open(
            sequence_id=1,
            incarnation=self.incarnation,
            token_ids=self.target.committed,
            max_length=self.max_length,
            drafter="test",
            max_lookahead=self.max_lookahead,
            tokens_per_message=self.random.randint(1, 3),
        )
        self.draft = self.draft_class(opening)
        self.epoch_before = self.draft.epoch
        self.base_before = self.draft.base

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

    def offer(self) -> None:
        candidate = self.draft.offer()
        if candidate is None:
            return
        ghosts = [self.drafted_from[candidate.start + offset] for offset in range(len(candidate.token_ids))]
        self.to_target.send((candidate, ghosts), lose=self.faults.lose, duplicate=self.faults.duplicate)

    def deliver_candidate(self) -> None:
        self._receive(self.to_target.next())

    def deliver_copy(self) -> None:
        self._receive(self.to_target.any_copy())

    def _receive(self, sent: tuple[Candidate, list[tuple[int, ...]]] | None) -> None:
        if sent is None:
            return
        candidate, ghosts = sent
        reception = self.target.receive(candidate)
        self.receptions.append(reception)
        if reception is Reception.TAKEN:
            self.ghosts.update((candidate.start + offset, ghost) for offset, ghost in enumerate(ghosts))

    def deliver_verdict(self) -> None:
        self._hear(self.to_draft.next())

    def deliver_old_verdict(self) -> None:
        self._hear(self.to_draft.any_copy())

    def _hear(self, verdict: Verdict | None) -> None:
        if verdict is None:
            return
        transition = self.draft.preview(verdict)
        if transition is not None:
            self.draft.apply(transition)
            if transition.num_discarded and self.draft.epoch == self.epoch_before:
                raise Violation("R2: tokens were thrown away and the epoch did not rise")
            self.num_rollbacks += transition.num_discarded > 0

    def begin(self) -> None:
        if self.block is not None or self.target.remaining < 1:
            return
        block = self.target.begin(self.random.randint(0, self.max_lookahead))
        self.block = block.candidates
        prefix = self.target.committed
        for offset, token_id in enumerate(block.candidates):
            self._check_ghost(len(prefix) + offset, (*prefix, *block.candidates[:offset]), token_id)

    def commit(self) -> None:
        if self.block is None:
            return
        prefix = self.target.committed
        choices = [oracle_token((*prefix, *self.block[:offset])) for offset in range(len(self.block) + 1)]
        judged = self.target.candidates_to_judge()
        if len(judged) > len(self.block):
            self._check_ghost(len(prefix) + len(self.block), (*prefix, *self.block), judged[-1])
        acceptance = accept_equal(choices, judged)
        token_ids = acceptance.token_ids[: self.target.remaining]
        num_accepted = min(acceptance.num_accepted, len(token_ids))
        self.target.commit(token_ids, num_accepted)
        self.num_accepted += num_accepted
        self.block = None
        if not self.target.attached:
            self.num_alone += len(token_ids)
            return
        self.to_draft.send(self.target.verdict(), lose=self.faults.lose, duplicate=self.faults.duplicate)

    # The run

    def step(self) -> None:
        """One random action, then every check."""
        if self.random.random() < self.faults.restart:
            self.restart_draft()
        if self.random.random() < self.faults.vanish:
            self.lose_draft()
        actions = (
            self.propose,
            self.offer,
            self.deliver_candidate,
            self.deliver_candidate,
            self.deliver_copy,
            self.deliver_verdict,
            self.deliver_old_verdict,
            self.begin,
            self.commit,
        )
        self.random.choice(actions)()
        self.check()

    def run(self, max_steps: int = 4_000) -> None:
        """Until the text is full. Raises `Violation`; an error of the package counts as one."""
        try:
            for _ in range(max_steps):
                self.step()
                if self.target.remaining == 0 and self.block is None:
                    break
            else:
                raise Violation("L1: the text is not finished")
            if self.target.committed != oracle_text(self.prompt, self.max_length):
                raise Violation("I2: the text is not the target's")
        except AmusdError as error:
            raise Violation(f"{type(error).__name__}: {error}") from error

    def settle(self) -> None:
        """Deliver everything that is on its way, without faults, then let a flawless draft work one round trip."""
        self.faults = Faults(right=1.0, silent=0.0)
        if not self.target.attached:
            self.restart_draft()
        for _ in range(3):
            while self.to_target or self.to_draft:
                self.deliver_candidate()
                self.deliver_verdict()
            self.begin()
            self.commit()
            self.deliver_verdict()
            while self.draft.room:
                self.propose()
            self.offer()
        while self.to_target:
            self.deliver_candidate()

    def check(self) -> None:
        committed = self.target.committed
        if committed[: len(self.committed_before)] != self.committed_before:
            raise Violation("I1: the committed prefix changed")
        self.committed_before = committed
        if committed != oracle_text(self.prompt, len(committed)):
            raise Violation("I2: a committed token is not the target's")
        if self.draft.epoch < self.epoch_before:
            raise Violation("I3: the draft's epoch went back")
        self.epoch_before = self.draft.epoch
        if self.draft.base < self.base_before:
            raise Violation("I4: the draft's base went back")
        self.base_before = self.draft.base
        if self.draft.token_ids[: self.draft.base] != committed[: self.draft.base]:
            raise Violation("I4: the draft's base is not a committed prefix")
        if len(committed) > self.max_length:
            raise Violation("I5: the text is too long")
        if self.draft.length - self.draft.base > self.max_lookahead:
            raise Violation("R1: the draft runs too far ahead")

    def _check_ghost(self, position: int, prefix: tuple[int, ...], token_id: int) -> None:
        ghost = self.ghosts.get(position)
        if ghost != prefix:
            raise Violation(f"I6: token {token_id} at {position} was drafted from {ghost}, is judged behind {prefix}")
