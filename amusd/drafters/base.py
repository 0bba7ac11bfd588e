"""The interface between the draft worker and whatever proposes tokens."""

from __future__ import annotations

import abc
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from typing_extensions import Self

from amusd.config import Distribution
from amusd.errors import InvariantError, NotFiniteError
from amusd.protocol.draft_session import Guesses, Node, Transition

logger = logging.getLogger(__name__)


@functools.cache
def say_once(line: str) -> None:
    """Tell people once in this process."""
    logger.warning("%s", line)


def say_not_finite(error: NotFiniteError) -> None:
    """Tell people, once, that a draft model's logits are not finite."""
    say_once(f"draft: {error}, which costs speed alone: its weights are damaged, or overflow in drafter.dtype")


@dataclass(frozen=True, slots=True)
class Expansion:
    """One tree's part of a step: the arguments of `Drafter.expand`."""

    root: Node
    nodes: Sequence[Node]
    num_tokens: int = 1


def path_to(root: Node, node: Node) -> list[int]:
    """The tokens that lead from `root` to `node`."""
    path: list[int] = []
    here: Node | None = node
    while here is not None and here is not root:
        path.append(here.token_id)
        here = here.parent
    return path[::-1]


class Drafter(abc.ABC):
    """Computes nodes of one sequence's tree (`amusd/protocol/draft_session.py`).

    Guesses behind a node depend on the committed tokens and its path alone, whatever happened before.
    """

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """Committed tokens taken in; for a chain, with the drafted ones."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a chain that one step yields at no extra cost: 1 for a model, many for a lookup."""
        return 1

    @property
    def max_length(self) -> int | None:
        """Longest sequence; None: any. Beyond it the target goes on alone."""
        return None

    @property
    def tokens_per_replay(self) -> int:
        """Tokens of a chain per step where none is urgent: a GPU makes several in less time."""
        return 1

    def set_distribution(self, distribution: Distribution) -> None:  # noqa: B027 - a lookup draws nothing
        """Set what the target draws the next sequence from, so that more guesses are right."""

    def set_reference(self, token_ids: Sequence[int]) -> None:  # noqa: B027 - a draft that is one does not look at it
        """Set the target's whole text of the next sequence, prompt included, for a synthetic draft."""

    @abc.abstractmethod
    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """Forget everything and start from `token_ids`, one at least. Raises `NoRoomError` before any change.

        `capacity`: longest sequence, at most `max_length`; `fan_out`: most guesses behind a node.
        """

    def expand(self, root: Node, nodes: Sequence[Node], num_tokens: int = 1) -> Sequence[Guesses]:
        """Guess the tokens behind each of `nodes`: the root alone, or nodes whose parents were computed.

        A chain goes on behind its own guess, up to `num_tokens` in all: an entry for each, none without a proposal. A
        drafter implements this method or the next one.
        """
        return self.expand_together([self], [Expansion(root, nodes, num_tokens)])[0]

    @classmethod
    def expand_together(cls, drafters: Sequence[Self], parts: Sequence[Expansion]) -> list[Sequence[Guesses]]:
        """`expand` of several drafters that were made together; in one pass if they have a model."""
        together = zip(drafters, parts, strict=True)
        return [drafter.expand(part.root, part.nodes, part.num_tokens) for drafter, part in together]

    def take_rows(self) -> tuple[bytes, ...]:
        """Rows that the last step's tokens were drawn from, under the ratio test; else empty."""
        return ()

    @property
    def is_ready(self) -> bool:
        """Whether it can guess; False: it waits for features of what is committed."""
        return True

    def take_features(self, start: int, features: Tensor) -> None:  # noqa: B027 - most read none
        """Take in features, [rows, width], of the committed positions from `start` on.

        They may come late, again or never. Raises `ValueError` for another width.
        """

    @abc.abstractmethod
    def follow(self, transition: Transition) -> None:
        """Take in a verdict's change of the tree, of which `transition.alive` is left."""

    def look_up(self) -> tuple[tuple[int, ...], float]:
        """A free continuation of the committed tokens, and each token's probability."""
        return (), 0.0

    @abc.abstractmethod
    def close(self) -> None:
        """Release the sequence's memory, or keep it for the next `open`. Idempotent."""


class ChainDrafter(Drafter):
    """A drafter of one path, whose context is the whole sequence, drafted tokens included.

    Guarantees of every implementation (`tests/drafters/test_contract.py` runs them all):

    * After `open`, `propose`, `commit` and `truncate` the context is exactly the tokens taken in; `length` counts it.
    * Proposals depend on the context alone: `propose` after `truncate` equals that of a fresh drafter.
    * `truncate` is O(1) apart from dropping its own tokens, and checks before it changes anything.

    An implementation that keeps more of the sequence calls these methods first.
    """

    def __init__(self) -> None:
        self._context: list[int] = []
        self._capacity = 0

    @property
    def length(self) -> int:
        """Tokens in the context."""
        return len(self._context)

    def open(self, token_ids: Sequence[int], capacity: int, fan_out: int = 1) -> None:
        """Start from `token_ids`. Raises `ValueError` for none or more than `capacity`, and for trees."""
        if fan_out != 1:
            raise ValueError(f"fan_out {fan_out}: this drafter drafts chains")
        if not 1 <= len(token_ids) <= capacity:
            raise ValueError(f"{len(token_ids)} tokens to start from, between 1 and {capacity} allowed")
        self._context, self._capacity = list(token_ids), capacity

    @abc.abstractmethod
    def propose(self, max_tokens: int) -> tuple[int, ...]:
        """Up to `max_tokens` tokens after the context, which become part of it; may be empty."""

    def commit(self, token_ids: Sequence[int]) -> None:
        """Append tokens. Raises `ValueError` beyond the capacity, without any change."""
        if self.length + len(token_ids) > self._capacity:
            raise ValueError(f"{self.length} + {len(token_ids)} tokens, capacity {self._capacity}")
        self._context.extend(token_ids)

    def truncate(self, length: int) -> None:
        """Keep `length` tokens. Raises `ValueError` unless `1 <= length <= self.length`."""
        if not 1 <= length <= self.length:
            raise ValueError(f"cannot cut a context of {self.length} tokens to {length}")
        del self._context[length:]

    def close(self) -> None:
        """Forget the sequence."""
        self._context, self._capacity = [], 0

    @classmethod
    def propose_together(cls, drafters: Sequence[Self], max_tokens: Sequence[int]) -> list[tuple[int, ...]]:
        """`propose` of several drafters that were made together."""
        return [drafter.propose(number) for drafter, number in zip(drafters, max_tokens, strict=True)]

    @classmethod
    def expand_together(cls, drafters: Sequence[Self], parts: Sequence[Expansion]) -> list[Sequence[Guesses]]:
        """The next tokens behind the last node of each."""
        for drafter, part in zip(drafters, parts, strict=True):
            (last,) = part.nodes
            if drafter.length != last.position + 1:
                raise InvariantError(f"drafter holds {drafter.length} tokens, session {last.position + 1}")
        proposed = cls.propose_together(drafters, [part.num_tokens for part in parts])
        return [[((token_id, 1.0),) for token_id in token_ids] for token_ids in proposed]

    def follow(self, transition: Transition) -> None:
        """Cut what was contradicted, and append the target's tokens."""
        length = transition.committed_length - len(transition.token_ids) + len(transition.alive)
        if length < self.length:
            self.truncate(length)
        if transition.token_ids:
            self.commit(transition.token_ids)


DrafterFactory = Callable[[int], Sequence[Drafter]]
"""Makes that many drafters of one class over one model and memory. Called once."""


class Makers(NamedTuple):
    """Factories of one kind of drafter; None where it has no such shape.

    The i-th drafters of chains and of trees share a cache and take turns.
    """

    chains: DrafterFactory | None = None
    trees: DrafterFactory | None = None


def one_by_one(make: Callable[[], Drafter]) -> DrafterFactory:
    """A factory of drafters that share nothing."""
    return lambda number: [make() for _ in range(number)]
