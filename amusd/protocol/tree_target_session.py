"""Which candidates the target may verify, where the draft sends a tree of them. Pure: values in, values out.

    [0, committed_length)     committed, final
    behind it                 a tree of candidates: each node one token, with the draft's estimate of its probability

The draft numbers its nodes and names the parent of each; 0 stands for the committed prefix of the length that the
message names (its root). A node therefore says by itself which prefix it was drafted from, and there are no epochs:
when tokens are committed, the subtree that goes through them stays, and all else is gone.

Rules
    B1  A node counts if its parent does: the parent is in the tree, or is a committed token, or is the root, which is a
        committed prefix (append-only, so it stands for ever). Where a node's place is committed by now, it must be the
        committed token.
    B2  What was committed is remembered by number as long as messages that name it may be on their way, which is until
        the draft is known to build on a longer prefix.
    B3  The candidates at hand are the path that takes the likeliest child at each node, the first one among equals. A
        pass over several paths takes the likeliest nodes instead, and of that path as many as are among them.
    B4  Numbers follow each other. Where some are missing, a message was lost: the floor rises, and the next verdict has
        the draft offer its tree again.
    B5  `attach` starts a new life of the draft; nodes of any other life are stale.
    B6  The target alone can always go on, and a refused message changes nothing.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from amusd.errors import PeerProtocolError
from amusd.protocol.messages import CERTAINTY, Prepared
from amusd.protocol.target_session import Reception
from amusd.protocol.tracks import Tracks
from amusd.protocol.verification import Block, Verification

MAX_NODES = 4096
"""Candidates in one tree at most: far more than a draft can compute in a few passes."""
MAX_NUMBERS = 4 * MAX_NODES
"""Numbers that are remembered, or come in one message, at most: a node that is offered again has several."""


@dataclass(slots=True)
class _Node:
    token_id: int
    position: int
    number: int
    weight: int
    children: dict[int, _Node] = field(default_factory=dict)
    """By token."""


class TreeTargetSession(Verification[bytes]):
    """A `Verification` of the likeliest path through a tree of candidates."""

    _children: dict[int, _Node]
    """Of the committed prefix, by token."""
    _nodes: dict[int, _Node]
    """Everything in the tree, by number."""
    _epoch_floor = 0
    _next_number = 1
    _passed: dict[int, int]
    """Number of a node that was committed -> its position."""

    def __init__(
        self, *, sequence_id: int, prompt: tuple[int, ...], max_length: int, vocab_size: int, max_lookahead: int
    ) -> None:
        super().__init__(
            sequence_id=sequence_id,
            prompt=prompt,
            max_length=max_length,
            vocab_size=vocab_size,
            max_lookahead=max_lookahead,
        )
        self._forget_candidates()

    @property
    def num_candidates(self) -> int:
        """Length of the likeliest path."""
        return len(self._path())

    @property
    def epoch_floor(self) -> int:
        """Rises when nodes were lost."""
        return self._epoch_floor

    @property
    def draft_restarting(self) -> bool:
        """Nothing was prepared for what was committed."""
        return not self._children

    @property
    def weights(self) -> tuple[float, ...]:
        """Along the likeliest path: how likely the draft takes each candidate to be accepted if those before it are."""
        return tuple(node.weight / CERTAINTY for node in self._path())

    @property
    def num_nodes(self) -> int:
        """Size of the tree."""
        return len(self._nodes)

    def attach(self, incarnation: int) -> None:
        """A draft with this (positive) incarnation is told about the sequence; what an earlier one sent is void."""
        super().attach(incarnation)
        self._epoch_floor, self._next_number = 0, 1

    def begin(self, max_candidates: int, *, num_tracks: int = 1, max_rows: int = 0, min_chance: float = 0.0) -> Block:
        """As `Verification.begin`; the block may have alternatives, where a pass has tracks for them.

        Then it holds the `max_rows` - 1 likeliest candidates that the tracks have room for, and none that is less
        likely than `min_chance`.
        """
        block = super().begin(max_candidates)
        if num_tracks > 1 and block.candidates:
            depth = min(max_candidates, self.remaining - 1)
            tracks = Tracks(num_tracks)
            self._block = block = self._with_alternatives(block, depth, tracks, max_rows - 1, min_chance)
        return block

    def receive(self, prepared: Prepared) -> Reception:
        """Take in nodes. Raises `PeerProtocolError` for what no correct draft sends."""
        addressed = prepared.sequence_id == self.sequence_id and prepared.incarnation == self._incarnation
        if not (addressed and self._attached):
            return Reception.STALE
        self._check(prepared)
        if prepared.prefix_hash != self._stream.hash_before(prepared.root):
            return Reception.FOREIGN
        if prepared.base > self._draft_base:
            self._draft_base = prepared.base
            # B2: what the draft sends from now on names nothing before its base
            self._passed = {number: at for number, at in self._passed.items() if at >= prepared.base}
        self._draft_more = prepared.more
        self._epoch_floor += prepared.first > self._next_number
        self._next_number = max(self._next_number, prepared.first + len(prepared.token_ids))
        taken = False
        numbers = range(prepared.first, prepared.first + len(prepared.token_ids))
        for number, parent, token_id, weight in zip(
            numbers, prepared.parents, prepared.token_ids, prepared.weights, strict=True
        ):
            taken |= self._place(number, parent, prepared.root, token_id, weight)
        return Reception.TAKEN if taken or not prepared.token_ids else Reception.CONTRADICTED

    # Inside

    def _place(self, number: int, parent: int, root: int, token_id: int, weight: int) -> bool:
        """Put a node where it belongs; False where that place is no longer in the tree. A known number is no news."""
        if number in self._nodes or number in self._passed:
            return True
        if len(self._nodes) + len(self._passed) >= MAX_NUMBERS:
            return False
        above = self._nodes.get(parent)
        if above is not None:
            position, siblings = above.position + 1, above.children
        else:
            behind = root if parent == 0 else self._passed.get(parent, -1) + 1
            position, siblings = behind, self._children
            if behind == 0:
                return False
        committed_length = self._stream.committed_length
        if position < committed_length:
            agrees = self._stream.slice(position, position + 1)[0] == token_id
            if agrees:
                self._passed[number] = position
            return agrees
        node = siblings.get(token_id)
        if node is None:
            if len(self._nodes) >= MAX_NODES or position >= self.max_length:
                return False
            node = siblings[token_id] = _Node(token_id, position, number, weight)
        node.number = max(node.number, number)  # one that is offered again goes by its new number from now on
        self._nodes[number] = node
        return True

    def _path(self) -> list[_Node]:
        path: list[_Node] = []
        children = self._children
        while children:
            path.append(max(children.values(), key=_weight))
            children = path[-1].children
        return path

    def _with_alternatives(self, block: Block, depth: int, tracks: Tracks, number: int, min_chance: float) -> Block:
        """The `number` likeliest candidates down to `depth` that have a track."""
        last = self.committed_length + depth
        guesses: list[tuple[float, int, _Node, int, int]] = []  # a heap: the likeliest first, then the oldest
        num_seen = 0

        def look_behind(children: dict[int, _Node], chance: float, row: int, track: int) -> None:
            nonlocal num_seen
            for node in children.values():
                num_seen += 1
                heapq.heappush(guesses, (-chance * node.weight / CERTAINTY, num_seen, node, row, track))

        look_behind(self._children, 1.0, 0, 0)
        chosen: list[tuple[_Node, int]] = []  # with the one it follows, from 1; 0: the last committed token
        main = [0]
        while guesses and len(chosen) < number and -guesses[0][0] >= min_chance:
            chance, _, node, parent, parent_track = heapq.heappop(guesses)
            track = tracks.place(node.position, parent_track)
            if track is None:
                continue
            chosen.append((node, parent))
            if track == 0:
                main.append(len(chosen))
            if node.position + 1 < last:
                look_behind(node.children, -chance, len(chosen), track)
        others = [index for index in range(1, len(chosen) + 1) if index not in main]
        rows = {index: row for row, index in enumerate((*main, *others))}
        return Block(
            start=block.start,
            last_token=block.last_token,
            candidates=tuple(chosen[index - 1][0].token_id for index in main[1:]),
            alternatives=tuple(chosen[index - 1][0].token_id for index in others),
            alternative_parents=tuple(rows[chosen[index - 1][1]] for index in others),
        )

    def _candidates(self, number: int) -> tuple[int, ...]:
        return tuple(node.token_id for node in self._path()[:number])

    def _advance(self, token_ids: tuple[int, ...]) -> None:
        self._stream.extend_tail(token_ids)
        self._stream.commit(self._stream.length)
        for token_id in token_ids:
            node = self._children.get(token_id)
            if node is None:
                self._children, self._nodes = {}, {}
                return
            self._passed[node.number] = node.position
            self._children = node.children
        self._nodes = {}
        rest = list(self._children.values())
        while rest:
            node = rest.pop()
            self._nodes[node.number] = node
            rest += node.children.values()

    def _forget_candidates(self) -> None:
        self._children, self._nodes, self._passed = {}, {}, {}

    def _check(self, prepared: Prepared) -> None:
        self._check_head(prepared.base, prepared.token_ids)
        if not self.prompt_length <= prepared.root <= prepared.base:
            raise PeerProtocolError(f"nodes hang behind {prepared.root} tokens, their base is {prepared.base}")
        if len(prepared.token_ids) > MAX_NUMBERS:
            raise PeerProtocolError(f"{len(prepared.token_ids)} nodes in one message, at most {MAX_NUMBERS} are taken")
        if not len(prepared.token_ids) == len(prepared.parents) == len(prepared.weights):
            raise PeerProtocolError("nodes without a parent or a weight each")
        if prepared.first < 1 or any(
            not 0 <= parent < prepared.first + index for index, parent in enumerate(prepared.parents)
        ):
            raise PeerProtocolError("a node's parent must have a lower number than it has")
        if any(not 0 <= weight <= CERTAINTY for weight in prepared.weights):
            raise PeerProtocolError(f"a weight outside [0, {CERTAINTY}]")


def _weight(node: _Node) -> int:
    return node.weight
