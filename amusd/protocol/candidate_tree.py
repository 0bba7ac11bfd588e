"""The candidates after the target's committed prefix: a tree of nodes, each one token."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Any, Literal, TypeAlias

from amusd.protocol.messages import CERTAINTY
from amusd.protocol.prefix_hash import CommittedPrefix
from amusd.protocol.verification import Block, Tracks

MAX_CANDIDATES = 4096
"""Most candidates in one tree: far more than a draft computes in a few passes."""
MAX_NUMBERS = 4 * MAX_CANDIDATES
"""Most node numbers in a tree or a message; a node offered again has several."""


Reception: TypeAlias = Literal["taken", "contradicted", "stale"]
"""The fate of a candidate message.

`taken`: some of its tokens are in the tree, or were committed meanwhile; `contradicted`: another token was committed
meanwhile; `stale`: its tokens follow contradicted or lost nodes, exceed a limit, or are from another draft process.
"""


@dataclass(slots=True)
class CandidateNode:
    """One candidate."""

    token_id: int
    number: int
    weight: int
    draft_probs: Any
    position: int = 0
    children: dict[int, CandidateNode] = field(default_factory=dict)
    """Children by token id."""


Children: TypeAlias = dict[int, CandidateNode]
_weight = attrgetter("weight")


class CandidateTree:
    """The tree after `prefix`."""

    def __init__(self, prefix: CommittedPrefix, max_length: int) -> None:
        self._prefix = prefix
        self._max_length = max_length
        self.children: Children = {}
        self.nodes: dict[int, CandidateNode] = {}
        """Nodes, also committed ones (T2), by number."""

    def forget_before(self, base: int) -> None:
        """Forget the numbers of nodes before `base`, which the draft no longer names (T2)."""
        self.nodes = {number: node for number, node in self.nodes.items() if node.position >= base}

    def add(self, node: CandidateNode, base: int, parent: int) -> Reception:
        """Add a node after its parent (T1). A known number is ignored."""
        if node.number in self.nodes:
            return "taken"
        above, end = self.nodes.get(parent), self._prefix.length
        if (above is None and parent) or len(self.nodes) >= MAX_NUMBERS:
            return "stale"
        node.position = base if above is None else above.position + 1
        if node.position < end:
            if self._prefix.token_ids[node.position] != node.token_id:
                return "contradicted"
            self.nodes[node.number] = node
            return "taken"
        siblings = self.children if above is None or node.position == end else above.children
        known = siblings.get(node.token_id)
        if known is not None:
            known.number = max(known.number, node.number)  # offered again under a new number
        elif len(self.nodes) >= MAX_CANDIDATES or node.position >= self._max_length:
            return "stale"
        else:
            known = siblings[node.token_id] = node
        self.nodes[node.number] = known
        return "taken"

    def path(self) -> list[CandidateNode]:
        """The likeliest path (T3)."""
        path: list[CandidateNode] = []
        children = self.children
        while children:
            path.append(max(children.values(), key=_weight))
            children = path[-1].children
        return path

    def likeliest_after(self, token_ids: Iterable[int]) -> CandidateNode | None:
        """The likeliest candidate after this path; None without one."""
        children = self.children
        for token_id in token_ids:
            node = children.get(token_id)
            if node is None:
                return None
            children = node.children
        return max(children.values(), key=_weight, default=None)

    def block(self, depth: int, tracks: Tracks, num_candidates: int, min_chance: float) -> Block:
        """The last committed token and the `num_candidates` likeliest candidates within `depth` that get a track."""
        guesses: list[tuple[float, int, CandidateNode, int]] = []  # a heap, the likeliest first
        order, start = count(), self._prefix.length - 1

        def guess_after(parent: int, children: Children, chance: float) -> None:
            for node in children.values():
                heapq.heappush(guesses, (-chance * node.weight / CERTAINTY, next(order), node, parent))

        # `nodes[i]` has place i + 1; place 0 is the last committed token's
        nodes: list[CandidateNode] = []
        parents: list[int] = []
        track_of = [0]
        guess_after(0, self.children, 1.0)
        while guesses and len(nodes) < num_candidates and -guesses[0][0] >= min_chance:
            chance, _, node, parent = heapq.heappop(guesses)
            track = None if node.position > start + depth else tracks.place(node.position, track_of[parent])
            if track is None:
                continue
            nodes.append(node)
            parents.append(parent)
            track_of.append(track)
            guess_after(len(nodes), node.children, -chance)
        main = [place for place, track in enumerate(track_of) if track == 0]
        others = [place for place, track in enumerate(track_of) if track > 0]
        rows = {place: row for row, place in enumerate((*main, *others))}
        return Block(
            start=start,
            last_token=self._prefix.token_ids[start],
            candidates=tuple(nodes[place - 1].token_id for place in main[1:]),
            alternatives=tuple(nodes[place - 1].token_id for place in others),
            alternative_parents=tuple(rows[parents[place - 1]] for place in others),
            draft_probs=tuple(nodes[place - 1].draft_probs for place in main[1:]),
        )

    def advance(self, token_ids: Sequence[int]) -> bool:
        """Keep the subtree after tokens just committed; return whether they contradict the tree."""
        start, is_contradicted = self._prefix.length - len(token_ids), False
        nodes = {number: node for number, node in self.nodes.items() if node.position < start}
        for token_id in token_ids:
            node = self.children.get(token_id)
            if node is None:
                is_contradicted, self.children = bool(self.children), {}
                break
            nodes[node.number] = node
            self.children = node.children
        rest = list(self.children.values())
        while rest:
            node = rest.pop()
            nodes[node.number] = node
            rest += node.children.values()
        self.nodes = nodes
        return is_contradicted
