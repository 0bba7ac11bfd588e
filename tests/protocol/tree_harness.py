"""Drives the two sessions of a tree, with a record of what every node was drafted from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.schedule import VOCAB_SIZE, Schedule, Violation, oracle_token

from amusd.protocol.messages import Open, Prepared
from amusd.protocol.target_session import Reception
from amusd.protocol.tree_draft_session import Adoption, Node, TreeDraftSession
from amusd.protocol.tree_target_session import TreeTargetSession
from amusd.protocol.verification import Block
from amusd.sampling.equality import Acceptance, accept_along

Drafted = tuple[tuple[int, ...], int]
"""A token, behind the prefix that it was drafted from."""


@dataclass
class TreeHarness(Schedule[Prepared, set[Drafted]]):
    """See `Schedule`."""

    target_class: type[TreeTargetSession] = TreeTargetSession
    draft_class: type[TreeDraftSession] = TreeDraftSession
    num_alternatives: int = 0
    num_rescued: int = 0
    num_adopted: int = 0
    num_missed: int = 0

    num_round_trips = 8

    def new_target(self, **options: Any) -> TreeTargetSession:
        self.prefixes: list[tuple[int, ...]] = []
        return self.target_class(**options)

    def new_draft(self, **opening: Any) -> TreeDraftSession:
        self.drafted: set[Drafted] = set()
        self.fan_out = self.random.randint(1, 3)
        rows_per_step = self.random.randint(1, 4)
        return self.draft_class(
            Open(**opening, tokens_per_message=1, fan_out=self.fan_out, rows_per_step=rows_per_step)
        )

    @property
    def own_actions(self) -> Sequence[Callable[[], None]]:
        return (self.propose, self.propose, self.look_up)

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

    def work(self) -> None:
        while self.draft.has_work:
            self.propose()

    def prepared(self) -> tuple[Prepared, set[Drafted]] | None:
        unsent = list(self.draft._unsent)
        prepared = self.draft.offer()
        if prepared is None:
            return None
        return prepared, {((*self.prefix_of(node)[:-1],), node.token_id) for node in unsent}

    def taken(self, message: Prepared, origin: set[Drafted], reception: Reception) -> None:
        if message.incarnation == self.incarnation:
            self.drafted |= origin

    def heard(self, change: Adoption) -> None:
        self.num_adopted += bool(change.kept) and not change.token_ids
        self.num_missed += bool(change.num_discarded)

    def verify(self) -> None:
        num_tracks, max_rows = self.random.randint(1, 4), self.random.randint(2, 9)
        depth = self.random.randint(0, self.max_lookahead)
        self.block: Block = self.target.begin(depth, num_tracks=num_tracks, max_rows=max_rows)
        self.num_alternatives += len(self.block.alternatives)
        self.prefixes = [self.target.committed]  # of what stands behind each row
        for token_id, parent in zip(self.block.token_ids[1:], self.block.parents, strict=True):
            prefix = self.prefixes[parent]
            if (prefix, token_id) not in self.drafted:
                raise Violation(f"I6: token {token_id} at {len(prefix)} was drafted from something else")
            self.prefixes.append((*prefix, token_id))
        if self.block.alternatives and len(self.block.parents) >= max_rows:
            raise Violation(f"{len(self.block.parents) + 1} rows in a pass of {max_rows}")

    def judge(self) -> Acceptance:
        choices = [oracle_token(prefix) for prefix in self.prefixes]
        acceptance, _ = accept_along(choices.__getitem__, self.block.next_row, len(choices))
        num_accepted = min(acceptance.num_accepted, self.target.remaining)
        self.num_rescued += self.block.num_rescued(acceptance.token_ids[:num_accepted])
        return acceptance

    def check(self) -> None:
        super().check()
        base = self.draft.base
        if self.draft.committed != self.target.committed[:base]:
            raise Violation("I4: the draft's base is not a committed prefix")
        below = list(self.draft.root.below())
        if len(below) != self.draft.num_nodes:
            raise Violation("the draft miscounts its nodes")
        for node in below:
            if not base <= node.position < base + self.max_lookahead:
                raise Violation("R1: the draft runs too far ahead")
            if node.position >= self.max_length - 1:
                raise Violation("R1: the draft writes where the target alone does")
