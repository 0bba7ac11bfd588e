"""What the draft may do next in one sequence where it prepares for several verdicts. Pure: values in, values out.

    [0, base)      committed, as far as the draft knows
    behind it      a tree of nodes, each one token; the root stands for the last committed token

A node is first a guess (some token may follow its parent) and can then be computed, which gives guesses of what follows
it. The likeliest guesses are computed first, whatever their depth: one chain where the draft is sure, alternatives
where it is not.

Rules
    R1  No node is more than `max_lookahead` tokens ahead of `base`, and none stands where the target alone writes: at
        the last position of the sequence.
    R2  A guess that is less likely to be needed than `min_probability` is not made, and none is while the tree has
        `max_nodes` nodes; each is thought of again when a verdict has changed that.
    R3  Every node is offered once, after its parent, with the prefix that the tree hangs behind; all are offered again,
        under new numbers, when the target's floor says that something was lost.
    R4  A verdict that adds nothing is ignored; one that contradicts what the target committed before is refused.
    R5  A refused message changes nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from amusd.errors import PeerProtocolError
from amusd.protocol.drafting import Drafting
from amusd.protocol.messages import CERTAINTY, Open, Prepared, Verdict

MIN_PROBABILITY = 0.005
"""Below this a prepared token is worth neither energy nor a message."""
MAX_NODES = 256
"""Nodes of a tree at most."""


@dataclass(slots=True, eq=False)
class Node:
    """One token of the tree."""

    parent: Node | None
    """None for the root."""
    token_id: int
    position: int
    probability: float
    """That the text goes through it, given the root."""
    weight: float
    """That it follows its parent."""
    number: int = 0
    """Names it towards the target, from 1; 0 as long as it has not been offered."""
    step: int = 0
    """Which step guessed it, from 1; 0: none had to."""
    computed: bool = False
    children: list[Node] = field(default_factory=list)
    unmade: list[tuple[int, float, int]] = field(default_factory=list)
    """Guesses of what follows it that were not made (R2): token, weight, step."""

    def child(self, token_id: int) -> Node | None:
        """The guess that `token_id` follows."""
        return next((child for child in self.children if child.token_id == token_id), None)

    def below(self) -> Iterator[Node]:
        """All nodes under this one, parents first."""
        rest = list(self.children)
        while rest:
            node = rest.pop()
            yield node
            rest += node.children


@dataclass(frozen=True, slots=True)
class Adoption:
    """What a verdict does to the tree."""

    kept: tuple[Node, ...]
    """Nodes on the committed path, in its order: they become part of the prefix."""
    token_ids: tuple[int, ...]
    """Committed tokens behind them that the tree did not have; if there are any, all of the tree is gone."""
    committed_length: int
    """Committed length afterwards."""
    epoch: int
    """Epoch afterwards; a new one has everything offered again."""
    num_discarded: int
    """Nodes that are gone because the verdict contradicts the tree; 0 where it foresaw it, or was only too short."""


class TreeDraftSession(Drafting):
    """The draft's state of one sequence, opened by `opening`."""

    def __init__(self, opening: Open, *, min_probability: float = MIN_PROBABILITY, max_nodes: int = MAX_NODES) -> None:
        super().__init__(opening)
        if opening.fan_out < 1:
            raise PeerProtocolError("Open of a tree with fan_out below 1")
        self._rows_per_step = opening.rows_per_step
        self._min_probability = min_probability
        self._max_nodes = max_nodes
        self._next_number = 1
        self._root = self._new_root()
        self._guesses: list[tuple[float, int, Node]] = []  # a heap: the likeliest first, then the oldest
        self._num_guessed = 0
        self._num_steps = 0
        self._num_nodes = 0
        self._unsent: list[Node] = []
        self._said_no_more = False

    @property
    def committed(self) -> tuple[int, ...]:
        """The tokens of it."""
        return self._stream.committed

    @property
    def root(self) -> Node:
        """The last committed token."""
        return self._root

    @property
    def num_nodes(self) -> int:
        """Size of the tree, the root not counted."""
        return self._num_nodes

    @property
    def has_work(self) -> bool:
        """There is something worth computing before the next verdict."""
        return self._may_grow(self._root) and (not self._root.computed or self._has_guess())

    def next_nodes(self, row_share: float = 0.0) -> tuple[Node, ...]:
        """What to compute next, the likeliest first: the root alone, or up to `rows_per_step` guesses.

        `row_share`: what each further row adds to a step, relative to a step with one. Rows are added as long as that
        raises the probability computed in the same time, so that where the draft is sure its one path is not held up.
        """
        if not self._may_grow(self._root):
            return ()
        self._num_steps += 1
        if not self._root.computed:
            return (self._root,)
        chosen: list[Node] = []
        probability, cost = 0.0, 1.0 - row_share
        while len(chosen) < self._rows_per_step and self._has_guess():
            if -self._guesses[0][0] * cost < probability * row_share:
                break
            chosen.append(heapq.heappop(self._guesses)[2])
            probability += chosen[-1].probability
            cost += row_share
        return tuple(chosen)

    def grow(self, node: Node, guesses: Sequence[tuple[int, float]]) -> None:
        """`node` was computed; `guesses`: tokens that may follow it, each with its probability."""
        node.computed = True
        self._make(node, [(token_id, weight, self._num_steps) for token_id, weight in guesses])

    def guess_path(self, token_ids: Sequence[int], weight: float) -> int:
        """Guess that these tokens follow the root, each with probability `weight`; nothing is computed for that.

        Returns how many of these guesses are new.
        """
        node, before = self._root, self._num_nodes
        for token_id in token_ids:
            if not self._may_grow(node):
                break
            known = node.child(token_id)
            node = known if known is not None else self._guess(node, token_id, weight, 0)
        return self._num_nodes - before

    def offer(self) -> Prepared | None:
        """The next message for the target, or None while there is nothing to say."""
        more = self.has_work
        if not self._unsent and (more or self._said_no_more):
            return None
        nodes, self._unsent = self._unsent, []
        first = self._next_number
        for node in nodes:
            node.number = self._next_number
            self._next_number += 1
        self._said_no_more = not more
        return Prepared(
            sequence_id=self.sequence_id,
            incarnation=self.incarnation,
            base=self.base,
            root=self.base,
            prefix_hash=self._stream.hash_before(self.base),
            first=first,
            parents=tuple(self._number_of(node.parent) for node in nodes),
            token_ids=tuple(node.token_id for node in nodes),
            weights=tuple(min(CERTAINTY, round(node.weight * CERTAINTY)) for node in nodes),
            more=more,
        )

    def preview(self, verdict: Verdict) -> Adoption | None:
        """What `apply` would do; None for a stale verdict. Changes nothing but the count of stale ones.

        Raises `PeerProtocolError` for a verdict that no correct target sends.
        """
        new = self._news(verdict)
        if new is None:
            return None
        kept: list[Node] = []
        node = self._root
        while len(kept) < len(new) and (child := node.child(new[len(kept)])) is not None:
            kept.append(child)
            node = child
        contradicted = len(kept) < len(new) and bool(node.children)
        return Adoption(
            kept=tuple(kept),
            token_ids=new[len(kept) :],
            committed_length=self.base + len(new),
            epoch=max(self._epoch, verdict.epoch_floor),
            num_discarded=self._num_nodes - len(kept) if contradicted else 0,
        )

    def apply(self, adoption: Adoption) -> None:
        """Carry out what `preview` returned, with nothing in between."""
        self._stream.extend_tail(tuple(node.token_id for node in adoption.kept) + adoption.token_ids)
        self._stream.commit(adoption.committed_length)
        if adoption.token_ids:
            self._root = self._new_root()
        elif adoption.kept:
            self._root = adoption.kept[-1]
            self._root.parent = None
        alive = list(self._root.below())
        if adoption.epoch != self._epoch:
            self._epoch = adoption.epoch
            self._unsent = alive
            for node in alive:
                node.number = 0
        self._num_nodes = len(alive)
        self._guesses = []
        for node in alive:
            node.probability /= self._root.probability
            if not node.computed:
                self._push(node)
        self._root.probability = 1.0
        unsent = {id(node) for node in alive if not node.number}
        self._unsent = [node for node in self._unsent if id(node) in unsent]
        for node in (self._root, *alive):
            if node.unmade:
                self._make(node, node.unmade)
        self._said_no_more = False

    # Inside

    def _new_root(self) -> Node:
        position = self._stream.length - 1
        return Node(None, self._stream.slice(position, position + 1)[0], position, probability=1.0, weight=1.0)

    def _guess(self, parent: Node, token_id: int, weight: float, step: int) -> Node:
        node = Node(parent, token_id, parent.position + 1, parent.probability * weight, weight, step=step)
        self._num_nodes += 1
        parent.children.append(node)
        self._unsent.append(node)
        self._push(node)
        return node

    def _make(self, node: Node, guesses: Sequence[tuple[int, float, int]]) -> None:
        """Those that are worth it; what is known (by a lookup) is not guessed twice."""
        node.unmade = []
        known = {child.token_id for child in node.children}
        for token_id, weight, step in guesses:
            if token_id in known:
                continue
            if node.probability * weight >= self._min_probability and self._num_nodes < self._max_nodes:
                self._guess(node, token_id, weight, step)
            else:
                node.unmade.append((token_id, weight, step))

    def _push(self, node: Node) -> None:
        self._num_guessed += 1
        heapq.heappush(self._guesses, (-node.probability, self._num_guessed, node))

    def _may_grow(self, node: Node) -> bool:
        """Whether candidates may stand behind it."""
        limit = min(self.base + self._max_lookahead, self._max_length - 1)
        return node.position + 1 < limit and self._num_nodes < self._max_nodes

    def _has_guess(self) -> bool:
        """Whether the likeliest guess is worth computing. Drops those that never will be."""
        while self._guesses:
            probability, _, node = self._guesses[0]
            if -probability < self._min_probability:
                return False
            if self._may_grow(node):
                return True
            heapq.heappop(self._guesses)  # too far ahead; a later root may bring it back (`apply` rebuilds the heap)
        return False

    def _number_of(self, parent: Node | None) -> int:
        return 0 if parent is None or parent is self._root else parent.number
