"""Drives the two tree sessions through a random schedule, with a record of what every node was drafted from.

As `harness.py`, whose oracle and faults it shares.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from protocol.channel import Channel
from protocol.harness import VOCAB_SIZE, Faults, Violation, oracle_token

from amusd.errors import AmusdError
from amusd.protocol.messages import Open, Prepared, Verdict
from amusd.protocol.target_session import Reception
from amusd.protocol.tree_draft_session import Node, TreeDraftSession
from amusd.protocol.tree_target_session import TreeTargetSession
from amusd.protocol.verification import Block
from amusd.sampling.equality import accept_along

Drafted = tuple[tuple[int, ...], int]
"""A token, behind the prefix that it was drafted from."""


@dataclass
class TreeHarness:
    """One sequence between a target and a draft session, and the two channels between them."""

    seed: int
    faults: Faults = field(default_factory=Faults)
    max_length: int = 40
    max_lookahead: int = 6
    target_class: type[TreeTargetSession] = TreeTargetSession
    draft_class: type[TreeDraftSession] = TreeDraftSession
    num_accepted: int = 0
    num_alternatives: int = 0
    num_rescued: int = 0
    num_adopted: int = 0
    num_missed: int = 0
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
        self.to_target = Channel[tuple[Prepared, set[Drafted]]](self.random)
        self.to_draft = Channel[Verdict](self.random)
        self.drafted: set[Drafted] = set()
        self.block: Block | None = None
        self.prefixes: list[tuple[int, ...]] = []
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
        self.drafted = set()
        self.to_draft.clear()
        opening = Open(
            sequence_id=1,
            incarnation=self.incarnation,
            token_ids=self.target.committed,
            max_length=self.max_length,
            drafter="test",
            max_lookahead=self.max_lookahead,
            tokens_per_message=1,
            fan_out=self.random.randint(1, 3),
            rows_per_step=self.random.randint(1, 4),
        )
        self.fan_out = opening.fan_out
        self.draft = self.draft_class(opening)
        self.base_before = self.draft.base

    def prefix_of(self, node: Node) -> tuple[int, ...]:
        """All tokens up to and with this node's."""
        path: list[int] = []
        here: Node | None = node
        while here is not None and here is not self.draft.root:
            path.append(here.token_id)
            here = here.parent
        return (*self.draft.committed, *reversed(path))

    def propose(self) -> None:
        for node in self.draft.next_nodes():
            prefix = self.prefix_of(node)
            right = oracle_token(prefix)
            others = [token for token in range(VOCAB_SIZE) if token != right]
            self.random.shuffle(others)
            tokens = others[: self.fan_out]
            if self.random.random() < self.faults.right:
                tokens[self.random.randrange(len(tokens))] = right
            self.draft.grow(node, [(token, self.random.uniform(0.1, 0.6)) for token in tokens])

    def look_up(self) -> None:
        prefix, tokens = self.draft.committed, []
        for _ in range(self.random.randint(1, 4)):
            tokens.append(oracle_token((*prefix, *tokens)) if self.random.random() < self.faults.right else 0)
        self.draft.guess_path(tokens, 0.9)

    def offer(self) -> None:
        unsent = list(self.draft._unsent)
        prepared = self.draft.offer()
        if prepared is None:
            return
        drafted = {((*self.prefix_of(node)[:-1],), node.token_id) for node in unsent}
        self.to_target.send((prepared, drafted), lose=self.faults.lose, duplicate=self.faults.duplicate)

    def deliver(self) -> None:
        self._receive(self.to_target.next())

    def deliver_copy(self) -> None:
        self._receive(self.to_target.any_copy())

    def _receive(self, sent: tuple[Prepared, set[Drafted]] | None) -> None:
        if sent is None:
            return
        prepared, drafted = sent
        reception = self.target.receive(prepared)
        self.receptions.append(reception)
        if prepared.incarnation == self.incarnation:
            self.drafted |= drafted

    def deliver_verdict(self) -> None:
        self._hear(self.to_draft.next())

    def deliver_old_verdict(self) -> None:
        self._hear(self.to_draft.any_copy())

    def _hear(self, verdict: Verdict | None) -> None:
        if verdict is None:
            return
        adoption = self.draft.preview(verdict)
        if adoption is not None:
            self.draft.apply(adoption)
            self.num_adopted += bool(adoption.kept) and not adoption.token_ids
            self.num_missed += bool(adoption.num_discarded)

    def begin(self) -> None:
        if self.block is not None or self.target.remaining < 1:
            return
        num_tracks, max_rows = self.random.randint(1, 4), self.random.randint(2, 9)
        depth = self.random.randint(0, self.max_lookahead)
        self.block = block = self.target.begin(depth, num_tracks=num_tracks, max_rows=max_rows)
        self.num_alternatives += len(block.alternatives)
        self.prefixes = [self.target.committed]  # of what stands behind each row
        for token_id, parent in zip(block.token_ids[1:], block.parents, strict=True):
            prefix = self.prefixes[parent]
            if (prefix, token_id) not in self.drafted:
                raise Violation(f"I6: token {token_id} at {len(prefix)} was drafted from something else")
            self.prefixes.append((*prefix, token_id))
        if block.alternatives and len(block.parents) >= max_rows:
            raise Violation(f"{len(block.parents) + 1} rows in a pass of {max_rows}")

    def commit(self) -> None:
        if self.block is None:
            return
        choices = [oracle_token(prefix) for prefix in self.prefixes]
        acceptance, _ = accept_along(choices.__getitem__, self.block.next_row, len(choices))
        token_ids = acceptance.token_ids[: self.target.remaining]
        num_accepted = min(acceptance.num_accepted, len(token_ids))
        self.num_rescued += self.block.num_rescued(token_ids[:num_accepted])
        self.target.commit(token_ids, num_accepted)
        self.num_accepted += num_accepted
        self.block = None
        if not self.target.attached:
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
            self.propose,
            self.look_up,
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
                if self.target.remaining == 0 and self.block is None:
                    break
            else:
                raise Violation("L1: the text is not finished")
        except AmusdError as error:
            raise Violation(f"{type(error).__name__}: {error}") from error

    def settle(self) -> None:
        """Deliver everything that is on its way, without faults, then let a flawless draft work for a while."""
        self.faults = Faults(right=1.0)
        if not self.target.attached:
            self.restart_draft()
        for _ in range(8):  # until no guess of the past is left
            while self.to_target or self.to_draft:
                self.deliver()
                self.deliver_verdict()
            self.begin()
            self.commit()
            self.deliver_verdict()
            while self.draft.has_work:
                self.propose()
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
        if self.draft.committed != committed[: self.draft.base]:
            raise Violation("I4: the draft's base is not a committed prefix")
        if len(committed) > self.max_length:
            raise Violation("I5: the text is too long")
        below = list(self.draft.root.below())
        if len(below) != self.draft.num_nodes:
            raise Violation("the draft miscounts its nodes")
        for node in below:
            if not self.draft.base <= node.position < self.draft.base + self.max_lookahead:
                raise Violation("R1: the draft runs too far ahead")
            if node.position >= self.max_length - 1:
                raise Violation("R1: the draft writes where the target alone does")
