"""The interface between the draft worker and drafters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import Self

from amusd.config import GREEDY, Distribution
from amusd.errors import NotFiniteError
from amusd.logs import warn_once
from amusd.protocol.draft_tree import Guesses, Node, Transition


def say_not_finite(error: NotFiniteError) -> None:
    """Warn once that a draft model's logits are not finite."""
    warn_once(f"draft: {error}, which costs speed alone: its weights are damaged, or overflow in drafter.dtype")


@dataclass(frozen=True, slots=True)
class Expansion:
    """One tree's part of a step."""

    root: Node
    nodes: Sequence[Node]
    """The root, or other nodes, parents first; for a chain, only the last node."""
    num_tokens: int = 1
    """Chains: most tokens to compute."""
    room: int = 1
    """Chains: most tokens, looked-up ones included."""

    @property
    def path(self) -> list[int]:
        """The tokens from the root to a chain's last node."""
        return path_to(self.root, self.nodes[-1])


def path_to(root: Node, node: Node) -> list[int]:
    """The tokens after `root`, up to that of `node`."""
    path: list[int] = []
    here: Node | None = node
    while here is not None and here is not root:
        path.append(here.token_id)
        here = here.parent
    return path[::-1]


def chain_of(token_ids: Sequence[int]) -> list[Guesses]:
    """A chain as guesses: one after each node."""
    return [((token_id, 1.0),) for token_id in token_ids]


class Drafter:
    """Guesses the tokens after nodes of one sequence's tree, which is a chain if `fan_out` is 1.

    Guesses depend only on the committed tokens, their features and the node's path.
    Override `propose` to give one continuation, `expand` to give several, or `step` to share passes of a model.
    """

    max_length: int | None = None
    """Longest sequence; None: any. Beyond it the target goes on alone."""
    tokens_per_replay = 1
    """Tokens of a chain's step that is not urgent; a GPU computes several faster at once."""
    is_ready = True
    """False while the drafter lacks features of committed tokens."""
    drafts_trees = True
    """Whether trees can be drafted; False: a chain, whatever `fan_out` is."""
    needs_parent = False
    """Whether a node can be computed only in a later step than its parent."""
    draws = True
    """Under the ratio test: whether tokens are drawn; False: the likeliest tokens are proposed as certain."""
    distribution: Distribution = GREEDY
    capacity = 0
    """Longest length of the sequence, at most `max_length`."""
    fan_out = 1
    """Most guesses after a node."""

    @functools.cached_property
    def committed(self) -> list[int]:
        """The committed tokens, which `open` sets and `commit` appends to."""
        return []

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return len(self.committed)

    def set_distribution(self, distribution: Distribution) -> None:
        """Set the target's distribution for the next sequence."""
        self.distribution = distribution if self.draws or distribution.rule != "rejection" else GREEDY

    def set_reference(self, token_ids: Sequence[int]) -> None:
        """Set the target's text of the next sequence, prompt included, for a synthetic draft."""

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """Start from `token_ids`, at least one. State kept from the last sequence may be reused."""
        self.committed, self.capacity, self.fan_out = list(token_ids), capacity, fan_out

    def foresee(self, path: Sequence[int]) -> None:
        """Hint that `propose` comes next for this `path`, so that a draft on another device can begin."""

    def propose(self, path: Sequence[int], room: int) -> Sequence[int]:  # noqa: ARG002 - for others
        """Up to `room` tokens after the committed ones and `path`; may be empty."""
        return ()

    def expand(self, root: Node, nodes: Sequence[Node], room: int = 1) -> Sequence[Guesses]:
        """The guesses after each of `nodes`. For a chain, entries for further tokens may follow."""
        return chain_of(self.propose(path_to(root, nodes[-1]), room))

    @classmethod
    def step(cls, drafters: Sequence[Self], parts: Sequence[Expansion]) -> list[Sequence[Guesses]]:
        """`expand` for drafters that were made together; all draft chains, or all trees."""
        return [drafter.expand(part.root, part.nodes, part.room) for drafter, part in zip(drafters, parts, strict=True)]

    def take_draft_probs(self) -> Sequence[bytes]:
        """The packed distributions that the last step's tokens were drawn from, under the ratio test; else empty."""
        return ()

    def take_features(self, start: int, features: Tensor) -> None:
        """Take in features, [rows, width], of the committed positions from `start` on.

        Features may come late, again or never. Raises `ValueError` for another width.
        """

    def follow(self, transition: Transition) -> None:
        """Take in a verdict's change of the tree."""
        self.commit([*(node.token_id for node in transition.kept), *transition.token_ids])

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens. From then on, guesses need no features."""
        self.committed += token_ids
        self.is_ready = True

    def look_up(self) -> tuple[Sequence[int], float]:
        """A free continuation of the committed tokens, and each token's probability."""
        return (), 0.0

    def close(self) -> None:
        """End the sequence, and keep state that may serve the next one. Idempotent."""

    def forget(self) -> None:
        """Drop the state of the last sequence: the next one does not continue it."""
        self.committed = []


DrafterFactory = Callable[[int], Sequence[Drafter]]
"""Makes a given number of drafters of one class over one model and memory. Called once."""
