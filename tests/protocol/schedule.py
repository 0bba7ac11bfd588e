"""A random schedule of everything that two sessions can do, with faults on the way between them.

The oracle is a function from a prefix to the target's next token. After every step the invariants of docs/protocol.md
are checked; `Violation` names the one that broke. What a chain and a tree do: `harness.py`, `tree_harness.py`.
"""

from __future__ import annotations

import abc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from protocol.channel import Channel

from amusd.errors import AmusdError
from amusd.protocol import prefix_hash
from amusd.protocol.messages import Candidate, Prepared, Verdict
from amusd.protocol.target_session import Reception
from amusd.sampling.equality import Acceptance

VOCAB_SIZE = 5

MessageT = TypeVar("MessageT", Candidate, Prepared)
OriginT = TypeVar("OriginT")
"""What the candidates of a message were drafted from."""


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
    """How often a chain's drafter has nothing to propose."""


@dataclass
class Schedule(abc.ABC, Generic[MessageT, OriginT]):
    """One sequence between a target and a draft session, and the two channels between them."""

    seed: int
    faults: Faults = field(default_factory=Faults)
    max_length: int = 40
    max_lookahead: int = 6
    num_accepted: int = 0
    num_returns: int = -1
    """Lives of the draft behind the first."""
    num_alone: int = 0
    """Tokens committed while there was no draft."""
    receptions: list[Reception] = field(default_factory=list)

    num_round_trips = 3
    """Until nothing of the past is left, of a draft that makes no mistakes."""

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.prompt = tuple(self.random.randrange(VOCAB_SIZE) for _ in range(self.random.randint(1, 4)))
        self.target = self.new_target(
            sequence_id=1,
            prompt=self.prompt,
            max_length=self.max_length,
            vocab_size=VOCAB_SIZE,
            max_lookahead=self.max_lookahead,
        )
        self.incarnation = 0
        self.to_target = Channel[tuple[MessageT, OriginT]](self.random)
        self.to_draft = Channel[Verdict](self.random)
        self.is_verifying = False
        self.committed_before = self.prompt
        self.restart_draft()

    # What differs

    @abc.abstractmethod
    def new_target(self, **options: Any) -> Any:
        """The target's session."""

    @abc.abstractmethod
    def new_draft(self, **opening: Any) -> Any:
        """The draft's session of a new life, of which nothing has arrived."""

    @property
    @abc.abstractmethod
    def own_actions(self) -> Sequence[Callable[[], None]]:
        """What a draft of this kind does."""

    @abc.abstractmethod
    def work(self) -> None:
        """Draft as far as there is room."""

    @abc.abstractmethod
    def prepared(self) -> tuple[MessageT, OriginT] | None:
        """What the draft has to say."""

    @abc.abstractmethod
    def taken(self, message: MessageT, origin: OriginT, reception: Reception) -> None:
        """The target has received this."""

    @abc.abstractmethod
    def heard(self, change: Any) -> None:
        """A verdict has changed the draft."""

    @abc.abstractmethod
    def verify(self) -> None:
        """Begin a pass, and check what its candidates were drafted from (I6)."""

    @abc.abstractmethod
    def judge(self) -> Acceptance:
        """What the pass commits, with room or without."""

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
        self.to_draft.clear()
        self.draft = self.new_draft(
            sequence_id=1,
            incarnation=self.incarnation,
            token_ids=self.target.committed,
            max_length=self.max_length,
            drafter="test",
            max_lookahead=self.max_lookahead,
        )
        self.base_before = self.draft.base

    def offer(self) -> None:
        prepared = self.prepared()
        if prepared is not None:
            self.to_target.send(prepared, lose=self.faults.lose, duplicate=self.faults.duplicate)

    def deliver(self) -> None:
        self._receive(self.to_target.next())

    def deliver_copy(self) -> None:
        self._receive(self.to_target.any_copy())

    def _receive(self, sent: tuple[MessageT, OriginT] | None) -> None:
        if sent is not None:
            reception = self.target.receive(sent[0])
            self.receptions.append(reception)
            self.taken(*sent, reception)

    def deliver_verdict(self) -> None:
        self._hear(self.to_draft.next())

    def deliver_old_verdict(self) -> None:
        self._hear(self.to_draft.any_copy())

    def _hear(self, verdict: Verdict | None) -> None:
        change = None if verdict is None else self.draft.preview(verdict)
        if change is not None:
            self.draft.apply(change)
            self.heard(change)

    def begin(self) -> None:
        if not self.is_verifying and self.target.remaining >= 1:
            self.is_verifying = True
            self.verify()

    def commit(self) -> None:
        if not self.is_verifying:
            return
        acceptance = self.judge()
        token_ids = acceptance.token_ids[: self.target.remaining]
        num_accepted = min(acceptance.num_accepted, len(token_ids))
        self.target.commit(token_ids, num_accepted)
        self.num_accepted += num_accepted
        self.is_verifying = False
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
            *self.own_actions,
            self.offer,
            self.deliver,
            self.deliver,
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
                if self.target.remaining == 0 and not self.is_verifying:
                    break
            else:
                raise Violation("L1: the text is not finished")
        except AmusdError as error:
            raise Violation(f"{type(error).__name__}: {error}") from error

    def settle(self) -> None:
        """Deliver everything that is on its way, without faults, then let a flawless draft work for a while."""
        self.faults = Faults(right=1.0, silent=0.0)
        if not self.target.attached:
            self.restart_draft()
        for _ in range(self.num_round_trips):
            while self.to_target or self.to_draft:
                self.deliver()
                self.deliver_verdict()
            self.begin()
            self.commit()
            self.deliver_verdict()
            self.work()
            self.offer()
        while self.to_target:
            self.deliver()

    def check(self) -> None:
        committed = self.target.committed
        if committed[: len(self.committed_before)] != self.committed_before:
            raise Violation("I1: the committed prefix changed")
        for length in range(len(self.committed_before), len(committed)):
            if committed[length] != oracle_token(committed[:length]):
                raise Violation("I2: a committed token is not the target's")
        self.committed_before = committed
        if self.draft.base < self.base_before:
            raise Violation("I4: the draft's base went back")
        self.base_before = self.draft.base
        if len(committed) > self.max_length:
            raise Violation("I5: the text is too long")
