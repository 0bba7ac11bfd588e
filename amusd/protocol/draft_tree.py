"""A draft's tree of tokens after the committed prefix, and the choice of the nodes to compute. Pure.

    [0, base)      committed, as far as the draft knows; the root is the last of these tokens
    after it       nodes, each one token

A node is a guess until it is computed, which gives guesses of the next token. The likeliest are computed first. With a
`fan_out` of 1 the tree is a chain, and its last node is the only guess.

Rules
    R1  No node is more than `max_lookahead` tokens ahead of `base`, at the last position of the sequence, or beyond the
        drafter's last position. After `max_steps` steps (0: no limit) no node is computed before the next verdict.
    R2  A guess below `MIN_PROBABILITY`, or beyond `MAX_NODES`, gets no node until a verdict changes that. Looked-up
        tokens may be less likely.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from amusd.protocol.messages import Open

MIN_PROBABILITY = 0.005
"""Least probability of a path that gets a node."""
MAX_NODES = 256
"""Most nodes of a tree that is no chain."""

Guesses = Sequence[tuple[int, float]]


@dataclass(slots=True, eq=False)
class Node:
    """One token of the tree."""

    parent: Node | None
    token_id: int
    position: int
    probability: float
    """Probability of the path from the root to this node."""
    weight: float
    number: int = 0
    """Number in messages, from 1; 0: the root, or not offered yet."""
    step: int = 0
    """Step that guessed the node, from 1; 0: looked up."""
    draft_probs: bytes = b""
    """The token's distribution, under the ratio test."""
    computed: int = 0
    """Step that computed the node, from 1; 0: none yet."""
    children: list[Node] = field(default_factory=list)
    unmade: Guesses = ()
    """Guesses that got no child (R2)."""

    def child(self, token_id: int) -> Node | None:
        """The child with `token_id`; None without one."""
        return next((child for child in self.children if child.token_id == token_id), None)

    def below(self) -> Iterator[Node]:
        """All nodes under this one, parents first."""
        rest = list(self.children)
        while rest:
            node = rest.pop()
            yield node
            rest += node.children


@dataclass(frozen=True, slots=True)
class Transition:
    """A verdict's change of the tree. `num_discarded > 0` is a rollback."""

    kept: tuple[Node, ...]
    """Nodes on the committed path, in order: they join the prefix."""
    token_ids: tuple[int, ...]
    """Committed tokens after `kept`, which the tree lacked."""
    alive: tuple[Node, ...]
    """Nodes left in the tree, parents first."""
    num_discarded: int
    """Number of nodes that the verdict contradicts."""


class DraftTree:
    """The tree after one sequence's committed prefix."""

    def __init__(self, opening: Open, draft_length: int | None, *, needs_parent: bool) -> None:
        """`draft_length`, `needs_parent`: as in `DraftSession`."""
        self._opening, self._needs_parent = opening, needs_parent
        self.is_chain = opening.fan_out == 1
        self.unsent: list[Node] = []
        """Nodes not offered yet, oldest first."""
        self._end = min(opening.max_length - 1, opening.max_length if draft_length is None else draft_length)
        self._max_nodes = opening.max_lookahead if self.is_chain else MAX_NODES
        self._guesses: list[tuple[float, int, Node]] = []  # a heap: the likeliest first, then the oldest
        self._order = count()
        self._num_steps = self._num_steps_before = 0
        self._go_on_from(_root(opening.token_ids[-1], len(opening.token_ids) - 1))

    # What may be computed

    @property
    def room(self) -> int:
        """Tokens that a chain may still get before the next verdict."""
        return max(0, self._limit - self.root.position - 1 - self.num_nodes)

    @property
    def has_work(self) -> bool:
        """Whether something is worth computing before the next verdict."""
        max_steps = self._opening.max_steps
        if max_steps and self._num_steps - self._num_steps_before >= max_steps:
            return False
        return self.value_of_next(0) > 0

    def value_of_next(self, num_taken: int) -> float:
        """Value of one more node for a step that has taken `num_taken` of this tree; 0: none is left.

        The value is the node's probability, divided by 1 + the expected number of right tokens in the tree.
        """
        probability = 0.0
        if self._may_grow(self.root):
            if not self.root.computed:
                probability = 1.0 if num_taken == 0 else 0.0
            elif num_taken < self._opening.rows_per_step and self._guesses:
                probability = -self._guesses[0][0]
        return probability / (1.0 + self._num_ready)

    def take_next(self, num_taken: int) -> Node:
        """Take the node whose value `value_of_next` returned."""
        self._num_steps += num_taken == 0
        return heapq.heappop(self._guesses)[2] if self.root.computed else self.root

    # How it grows

    def grow(self, nodes: Sequence[Node], found: Sequence[Guesses], draft_probs: Sequence[bytes] = ()) -> None:
        """Record that `nodes` were computed; `found`: the guesses after each. A chain goes on after its own guesses.

        `draft_probs`: under the ratio test, the distribution of each guess. Raises `ValueError` beyond `room`.
        """
        if len(found) > max(len(nodes), self.room):
            raise ValueError(f"{len(found)} tokens proposed, room for {self.room}")
        computed = list(nodes)
        for index, guesses in enumerate(found):
            node = computed[index]
            node.computed = self._num_steps
            for child in node.children if self._needs_parent else ():  # looked up
                self._push(child)
            # A chain goes on however unlikely it is.
            self._make(node, [(token_id, 1.0) for token_id, _ in guesses] if self.is_chain else guesses)
            if index < len(draft_probs):
                node.children[0].draft_probs = draft_probs[index]
            if len(computed) == index + 1 < len(found):
                computed.append(node.children[0])
        for node in computed:
            node.computed = self._num_steps
        if len(computed) > len(nodes):  # a chain's guesses that are computed by now
            self._guesses = [guess for guess in self._guesses if not guess[-1].computed]
            heapq.heapify(self._guesses)

    def guess_path(self, token_ids: Sequence[int], weight: float) -> int:
        """Guess these tokens after the root, each with probability `weight`; return how many are new."""
        node, before = self.root, self.num_nodes
        for token_id in token_ids if 0 < weight <= 1 else ():
            if not self._may_grow(node):
                break
            node = node.child(token_id) or self._guess(node, token_id, weight, 0)
        return self.num_nodes - before

    # What verdicts change

    def advance(self, token_ids: tuple[int, ...]) -> Transition:
        """Move the root along tokens just committed; only the subtree after the last stays."""
        kept: list[Node] = []
        node = self.root
        while len(kept) < len(token_ids) and (child := node.child(token_ids[len(kept)])) is not None:
            kept.append(child)
            node = child
        is_foreseen = len(kept) == len(token_ids)
        num_discarded = self.num_nodes - len(kept) if node.children and not is_foreseen else 0
        self._go_on_from(node if is_foreseen else _root(token_ids[-1], self.root.position + len(token_ids)))
        self._num_steps_before = self._num_steps
        return Transition(tuple(kept), token_ids[len(kept) :], tuple(self.root.below()), num_discarded)

    def offer_again(self) -> None:
        """Have all nodes offered again, under new numbers."""
        offered = sorted((node for node in self.root.below() if node.number), key=lambda node: node.number)
        for node in offered:
            node.number = 0
        self.unsent = offered + self.unsent

    def drop(self) -> int:
        """Begin anew at the last committed token; return how many nodes are gone."""
        num_nodes = self.num_nodes
        self._go_on_from(_root(self.root.token_id, self.root.position))
        return num_nodes

    def _go_on_from(self, root: Node) -> None:
        """Make `root` the root, and drop all that is not below it."""
        self.root = root
        root.parent, root.number = None, 0
        self._limit = min(root.position + 1 + self._opening.max_lookahead, self._end)
        alive = tuple(root.below())
        left = set(alive)
        self.unsent = [node for node in self.unsent if node in left]
        self.num_nodes = len(alive)
        self._num_ready = 0.0
        self._guesses = []
        for node in alive:
            node.probability /= root.probability
            self._num_ready += node.probability
            if not node.computed:
                self._push(node)
        root.probability = 1.0
        for node in (root, *alive):
            if node.unmade:
                self._make(node, node.unmade)

    def _guess(self, parent: Node, token_id: int, weight: float, step: int) -> Node:
        node = Node(parent, token_id, parent.position + 1, parent.probability * weight, weight, step=step)
        self.num_nodes += 1
        self._num_ready += node.probability
        parent.children.append(node)
        self.unsent.append(node)
        self._push(node)
        return node

    def _make(self, node: Node, guesses: Guesses) -> None:
        known = {child.token_id for child in node.children}
        unmade = []
        for token_id, weight in guesses:
            if token_id in known:
                continue
            if node.probability * weight >= MIN_PROBABILITY and self.num_nodes < self._max_nodes:
                self._guess(node, token_id, weight, node.computed)
            else:
                unmade.append((token_id, weight))
        node.unmade = unmade

    def _push(self, node: Node) -> None:
        """Queue a guess if it is likely enough, within the limit, and can be computed."""
        can_begin = not self._needs_parent or (node.parent is not None and node.parent.computed)
        if can_begin and node.position + 1 < self._limit and node.probability >= MIN_PROBABILITY:
            heapq.heappush(self._guesses, (-node.probability, next(self._order), node))

    def _may_grow(self, node: Node) -> bool:
        return node.position + 1 < self._limit and self.num_nodes < self._max_nodes


def _root(token_id: int, position: int) -> Node:
    return Node(None, token_id, position, probability=1.0, weight=1.0)


def next_nodes(trees: Sequence[DraftTree], row_share: float = 0.0) -> list[tuple[Node, ...]]:
    """Choose the nodes that one step computes of each tree: the root, up to `rows_per_step` guesses, or none.

    The most valuable node of all trees comes first; nodes are added while they raise the value per time.
    `row_share`: cost of a further row as a share of a one-row step.
    """
    taken: list[list[Node]] = [[] for _ in trees]
    waiting = [(-tree.value_of_next(0), index) for index, tree in enumerate(trees)]
    heapq.heapify(waiting)
    total, cost = 0.0, 1.0 - row_share
    while waiting and (value := -waiting[0][0]) > 0 and value * cost >= total * row_share:
        index = waiting[0][1]
        taken[index].append(trees[index].take_next(len(taken[index])))
        heapq.heapreplace(waiting, (-trees[index].value_of_next(len(taken[index])), index))
        total += value
        cost += row_share
    return [tuple(nodes) for nodes in taken]
