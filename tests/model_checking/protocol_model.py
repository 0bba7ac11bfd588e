"""The protocol of `amusd/protocol` as a transition system that is small enough to be explored completely.

Written from the rules in `docs/protocol.md` and on its own: it shares no code with the sessions. `test_transitions.py`
ties the two together. With a `fan_out` of 1 the draft's tree is a chain.

What it leaves out, and why nothing is lost by that
    the prompt      Position 0 is the first token after it.
    the text        The target's own token is 0 everywhere, and every other value is wrong. Tokens are compared with
                    others of the same position alone, so any text can be renamed to this one, position by position.
                    Whether a token stands where it belongs is told by its ghost, at which no rule looks.
    the hash        It is off, so that numbers alone must suffice.
    weights         A pass verifies any path of the tree, so also the likeliest. One over several paths commits what one
                    over the right one of them does; and I6 is asked of the whole tree.
    late ones       A candidate that is judged in the place of the bonus token changes no token, only how it is counted.
    `more`, sizes   The draft may offer what it has, or nothing, whenever it likes.
    death           A dead draft is one that takes no more steps. `Open` is part of `attach`, as a draft that gets it
                    late is one that begins late.
    the end         Nothing after it is verified, so the model has nothing after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar

Values = tuple[int, ...]


class Token(NamedTuple):
    value: int
    drafted_from: Values
    """Ghost: everything before it in the draft's stream when it was drafted."""


class Candidate(NamedTuple):
    incarnation: int
    base: int
    first: int
    parents: tuple[int, ...]
    tokens: tuple[Token, ...]


class Verdict(NamedTuple):
    incarnation: int
    epoch: int
    start: int
    values: Values


class Node(NamedTuple):
    """A node of a tree. In the target's it stands under each of its numbers that is still known."""

    number: int
    """0: the draft has not offered it yet."""
    path: Values
    """The values after the committed prefix that lead to it, its own last."""
    drafted_from: Values


class Target(NamedTuple):
    committed: Values = ()
    tree: frozenset[Node] = frozenset()
    passed: frozenset[tuple[int, int]] = frozenset()
    """Number and position of committed nodes that the draft may still name."""
    epoch: int = 0
    next_number: int = 1
    draft_base: int = 0
    attached: bool = True
    incarnation: int = 1
    block: Values | None = None
    """The candidates of the pass under way."""


class Draft(NamedTuple):
    incarnation: int = 1
    epoch: int = 0
    known: Values = ()
    """The committed tokens that it has heard of."""
    tree: tuple[Node, ...] = ()
    """Offered nodes by number, then the others in the order in which they will be offered."""
    next_number: int = 1


class State(NamedTuple):
    """Messages on their way are a set, and delivering takes none out: each may arrive late, again, or never."""

    target: Target = Target()
    draft: Draft = Draft()
    to_target: frozenset[Candidate] = frozenset()
    to_draft: frozenset[Verdict] = frozenset()


class Step(NamedTuple):
    action: str
    subject: Candidate | Verdict | Token | None
    """The message or token that is delivered, sent or proposed."""
    state: State
    """The state after it."""


@dataclass(frozen=True)
class Bounds:
    fan_out: int = 1
    max_length: int = 3
    max_lookahead: int = 2
    max_nodes: int = 9
    """Most nodes of the draft's tree at a time."""
    vocab_size: int = 2
    max_incarnations: int = 2
    """Most incarnations of the draft, the first included."""
    max_epoch: int = 1
    """Losses can raise epochs without end; steps beyond this one are not followed."""
    max_in_flight: int | None = 1
    """Messages on their way in each direction: one more is lost, or takes the place of another. None: no limit."""


class Refused(Exception):  # noqa: N818 - an outcome
    """The session would raise `PeerProtocolError`."""


Message = TypeVar("Message", Candidate, Verdict)


def num_equal(left: Values, right: Values) -> int:
    """Length of the common prefix."""
    length = min(len(left), len(right))
    return next((i for i in range(length) if left[i] != right[i]), length)


def contradicts(left: Values, right: Values) -> bool:
    return num_equal(left, right) < min(len(left), len(right))


def in_order(tree: Iterable[Node]) -> tuple[Node, ...]:
    """Offered nodes by number; the others stay in their order."""
    return tuple(sorted(tree, key=lambda node: node.number or float("inf")))


class ProtocolModel:
    """Both sides and what is between them."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        # One side's state recurs in many of the whole.
        for rule in ("receive", "commit", "verdict", "attach", "offer", "hear"):
            setattr(self, rule, cache(getattr(self, rule)))

    def steps(self, state: State) -> Iterator[Step]:
        """Every step that is possible in this state."""
        target, draft, to_target, to_draft = state
        if self.room(target) < 1:
            return
        yield from self._deliveries(state)
        for proposed in self.propose(draft):
            node = proposed.tree[-1]
            token = Token(node.path[-1], node.drafted_from)
            yield Step("draft proposes", token, State(target, proposed, to_target, to_draft))
        offering, candidate = self.offer(draft)
        for channel in self._sent(to_target, candidate):
            yield Step("draft offers", candidate, State(target, offering, channel, to_draft))
        for action, after in self.steps_alone(target):
            yield Step(action, None, State(after, draft, to_target, to_draft))
        if target.attached:
            verdict = self.verdict(target)
            for channel in self._sent(to_draft, verdict):
                yield Step("target sends", verdict, State(target, draft, to_target, channel))
            yield Step("target detaches", None, State(self.detach(target), draft, to_target, to_draft))
        if target.incarnation < self.bounds.max_incarnations:
            attached = self.attach(target)
            yield Step(
                "target attaches a new incarnation", None, State(attached, self.open(attached), to_target, to_draft)
            )

    def steps_alone(self, target: Target) -> Iterator[tuple[str, Target]]:
        """The steps that the target takes without the draft."""
        if target.block is not None:
            yield "target commits", self.commit(target)
        elif self.room(target) > 0:
            for begun in self.begin(target):
                yield "target begins", begun

    def without_spent(self, state: State) -> State:
        """Remove messages that can change nothing any more: numbers, epochs, bases and incarnations only grow."""
        target, draft, to_target, to_draft = state
        spent = [candidate for candidate in to_target if self.is_spent(target, candidate)]
        old = [verdict for verdict in to_draft if not self.is_news(draft, verdict)]
        return State(target, draft, to_target.difference(spent), to_draft.difference(old)) if spent or old else state

    # The target

    def room(self, target: Target) -> int:
        return self.bounds.max_length - len(target.committed)

    def is_addressed(self, target: Target, candidate: Candidate) -> bool:
        return target.attached and candidate.incarnation == target.incarnation

    def is_spent(self, target: Target, candidate: Candidate) -> bool:
        says_nothing = (
            not candidate.tokens and candidate.first <= target.next_number and candidate.base <= target.draft_base
        )
        return not self.is_addressed(target, candidate) or says_nothing

    def receive(self, target: Target, candidate: Candidate) -> Target:
        if not self.is_addressed(target, candidate):
            return target
        _, base, first, parents, tokens = candidate
        if base > len(target.committed):
            raise Refused
        if base > target.draft_base:
            passed = frozenset(entry for entry in target.passed if entry[1] >= base)
            target = target._replace(draft_base=base, passed=passed)
        target = target._replace(
            epoch=target.epoch + (first > target.next_number),
            next_number=max(target.next_number, first + len(tokens)),
        )
        for number, (parent, token) in enumerate(zip(parents, tokens, strict=True), start=first):
            target = self.place(target, number, base, parent, token)
        return target

    def place(self, target: Target, number: int, root: int, parent: int, token: Token) -> Target:
        """Under the parent; or compared with what is committed there."""
        paths = {node.number: node.path for node in target.tree}
        passed = dict(target.passed)
        if number in paths or number in passed:
            return target
        if parent in paths:
            return self.hang(target, number, (*paths[parent], token.value), token)
        if parent == 0:
            position = root
        elif parent in passed:
            position = passed[parent] + 1
        else:
            return target
        if position == len(target.committed):
            return self.hang(target, number, (token.value,), token)
        if target.committed[position] == token.value:
            return target._replace(passed=target.passed | {(number, position)})
        return target

    def hang(self, target: Target, number: int, path: Values, token: Token) -> Target:
        return target._replace(tree=target.tree | {Node(number, path, token.drafted_from)})

    def begin(self, target: Target) -> Iterator[Target]:
        """A pass over any path of the tree, or over none."""
        paths = {node.path for node in target.tree if len(node.path) < self.room(target)}
        for path in ((), *sorted(paths)):
            yield target._replace(block=path)

    def choose(self, target: Target) -> Values:
        """The tokens that the pass commits: the accepted ones, then the target's own if it has scored one."""
        assert target.block is not None
        num_accepted = num_equal(target.block, (0,) * len(target.block))
        return (0,) * min(num_accepted + 1, self.room(target))

    def commit(self, target: Target) -> Target:
        values = self.choose(target)
        newest = {node.path: node.number for node in sorted(target.tree)}
        passed = {
            (newest[values[:depth]], len(target.committed) + depth - 1)
            for depth in range(1, len(values) + 1)
            if values[:depth] in newest
        }
        kept = frozenset(
            Node(node.number, node.path[len(values) :], node.drafted_from)
            for node in target.tree
            if node.number == newest[node.path] and len(node.path) > len(values) and node.path[: len(values)] == values
        )
        committed = target.committed + values
        return target._replace(committed=committed, tree=kept, passed=target.passed | passed, block=None)

    def verdict(self, target: Target) -> Verdict:
        return Verdict(target.incarnation, target.epoch, target.draft_base, target.committed[target.draft_base :])

    def detach(self, target: Target) -> Target:
        return target._replace(tree=frozenset(), passed=frozenset(), attached=False)

    def attach(self, target: Target) -> Target:
        fresh = Target(draft_base=len(target.committed), incarnation=target.incarnation + 1)
        return fresh._replace(committed=target.committed, block=target.block)

    # The draft

    def open(self, target: Target) -> Draft:
        return Draft(incarnation=target.incarnation, known=target.committed)

    def propose(self, draft: Draft) -> Iterator[Draft]:
        """One more node, wherever one may stand."""
        base, bounds = len(draft.known), self.bounds
        if len(draft.tree) >= bounds.max_nodes:
            return
        limit = min(base + bounds.max_lookahead, bounds.max_length - 1) - base
        paths = [node.path for node in draft.tree]
        for parent in ((), *paths):
            values = {path[-1] for path in paths if path[:-1] == parent}
            if len(parent) < limit and len(values) < bounds.fan_out:
                for value in range(bounds.vocab_size):
                    if value not in values:
                        node = Node(0, (*parent, value), draft.known + parent)
                        yield draft._replace(tree=(*draft.tree, node))

    def offer(self, draft: Draft) -> tuple[Draft, Candidate]:
        numbers = {(): 0} | {node.path: node.number for node in draft.tree}
        parents, tokens, number = [], [], draft.next_number
        for node in draft.tree:
            if not node.number:
                parents.append(numbers[node.path[:-1]])
                tokens.append(Token(node.path[-1], node.drafted_from))
                numbers[node.path] = number
                number += 1
        candidate = Candidate(draft.incarnation, len(draft.known), draft.next_number, tuple(parents), tuple(tokens))
        tree = in_order(node._replace(number=numbers[node.path]) for node in draft.tree)
        return draft._replace(tree=tree, next_number=number), candidate

    def is_news(self, draft: Draft, verdict: Verdict) -> bool:
        base, end = len(draft.known), verdict.start + len(verdict.values)
        is_newer = end > base or (end == base and verdict.epoch > draft.epoch)
        return verdict.incarnation == draft.incarnation and is_newer

    def hear(self, draft: Draft, verdict: Verdict) -> Draft:
        if not self.is_news(draft, verdict):
            return draft
        base, end = len(draft.known), verdict.start + len(verdict.values)
        values = verdict.values[base - verdict.start :]
        is_too_long = end > self.bounds.max_length
        if verdict.start > base or is_too_long or contradicts(draft.known[verdict.start :], verdict.values):
            raise Refused
        depth = len(values)
        tree = [
            node._replace(path=node.path[depth:])
            for node in draft.tree
            if node.path[:depth] == values and len(node.path) > depth
        ]
        if verdict.epoch > draft.epoch:  # all is offered again, in the same order
            tree = [node._replace(number=0) for node in tree]
        return draft._replace(epoch=max(draft.epoch, verdict.epoch), known=draft.known + values, tree=tuple(tree))

    # What is on its way

    def _deliveries(self, state: State) -> Iterator[Step]:
        target, draft, to_target, to_draft = state
        for candidate in to_target:
            try:
                received = self.receive(target, candidate)
            except Refused:
                yield Step("target refuses", candidate, state)
                continue
            if received.epoch <= self.bounds.max_epoch:
                yield Step("target receives", candidate, State(received, draft, to_target, to_draft))
        for verdict in to_draft:
            try:
                heard = self.hear(draft, verdict)
            except Refused:
                yield Step("draft refuses", verdict, state)
                continue
            yield Step("draft hears", verdict, State(target, heard, to_target, to_draft))

    def _sent(self, channel: frozenset[Message], message: Message) -> Iterator[frozenset[Message]]:
        limit = self.bounds.max_in_flight
        if limit is None or message in channel or len(channel) < limit:
            yield channel | {message}
            return
        yield channel
        for lost in channel:
            yield channel - {lost} | {message}
