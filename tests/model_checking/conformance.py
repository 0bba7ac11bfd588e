"""Follows a run of the real sessions through the model: whatever they do has to be a step of it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from model_checking import protocol_model
from model_checking.protocol_model import (
    Bounds,
    Draft,
    Drafted,
    Placed,
    ProtocolModel,
    State,
    Target,
    Token,
    Values,
)
from protocol.harness import VOCAB_SIZE, Harness, oracle_text

from amusd.protocol.draft_session import Node
from amusd.protocol.messages import Candidate, Verdict

ACTIONS = (
    "lose_draft",
    "restart_draft",
    "propose",
    "look_up",
    "offer",
    "deliver",
    "deliver_copy",
    "deliver_verdict",
    "deliver_old_verdict",
    "begin",
    "commit",
)


class Departure(AssertionError):  # noqa: N818 - a finding
    """The real sessions did what the model does not allow."""


class Follower:
    """Watches a harness and keeps the model in the state that the sessions are in.

    The model's messages are all that were ever sent, so that those on their way in the harness are among them.
    """

    def __init__(self, harness: Harness) -> None:
        self.state = State()
        self.actions: Counter[str] = Counter()
        """Steps of the model that were taken."""
        self._harness = harness
        self._drafted: dict[tuple[int, int], Values] = {}
        """Incarnation and number of a node -> what it was drafted from."""
        self._model = ProtocolModel(
            Bounds(
                fan_out=sys.maxsize,  # a lookup adds guesses to those of a step
                max_length=harness.max_length - len(harness.prompt),
                max_lookahead=harness.max_lookahead,
                max_nodes=sys.maxsize,
                vocab_size=VOCAB_SIZE,
                max_lives=sys.maxsize,
                max_epoch=sys.maxsize,
                max_in_flight=None,
            )
        )
        self._text = oracle_text(harness.prompt, harness.max_length + harness.max_lookahead + 1)
        self._follow("start")
        for name in ACTIONS:
            setattr(harness, name, self._followed(name, getattr(harness, name)))

    def _followed(self, name: str, action: Callable[[], None]) -> Callable[[], None]:
        def act() -> None:
            try:
                action()
            finally:  # a finding of the harness does not come before the one that is looked for here
                self._follow(name)

        return act

    def _follow(self, name: str) -> None:
        for goal in self._stages(self._observed()):
            if not _simulates(self.state, goal):
                self._step_to(goal, name)

    def _step_to(self, goal: State, name: str) -> None:
        for step in self._model.steps(self.state):
            if _simulates(step.state, goal):
                self.actions[step.action] += 1
                self.state = step.state
                return
        raise Departure(
            f"{name}: from {self.state.target} and {self.state.draft}, no step to {goal.target} and {goal.draft}"
        )

    def _stages(self, after: State) -> Iterator[State]:
        """The model proposes node by node, also where a verdict has the draft think again of guesses not made.

        It commits before it sends the verdict, and does nothing behind the end.
        """
        before = self.state
        if self._model.room(after.target) < 1:
            yield State(after.target, before.draft)
            return
        begun = [before.draft]
        if after.draft.known != before.draft.known:
            begun = [step.state.draft for step in self._model.steps(before) if step.action == "draft hears"]
        for draft in begun:
            if _extends(after.draft, draft):
                for number in range(len(draft.tree), len(after.draft.tree)):
                    yield before._replace(draft=after.draft._replace(tree=after.draft.tree[:number]))
                break
        if before.draft == after.draft:
            yield after._replace(to_draft=frozenset())
        yield after

    # What the sessions look like in the model's terms

    def _observed(self) -> State:
        for message, drafted in self._harness.to_target.on_its_way:
            for number, (prefix, _) in enumerate(drafted, start=message.first):
                self._drafted[message.incarnation, number] = self._values(0, prefix)[self._origin :]
        return State(
            self._target(),
            self._draft(),
            frozenset(self._candidate(message) for message, _ in self._harness.to_target.on_its_way),
            frozenset(self._verdict(verdict) for verdict in self._harness.to_draft.on_its_way),
        )

    def _target(self) -> Target:
        session, before = self._harness.target, self.state.target.block
        length, paths = session.committed_length, {}
        numbered = set()
        rest = [((), session._children)]
        while rest:
            path, children = rest.pop()
            for node in children.values():
                paths[id(node)] = (*path, node.token_id)
                numbered.add((node.number, paths[id(node)]))
                rest.append((paths[id(node)], node.children))
        numbered |= {(number, paths.get(id(node), ())) for number, node in session._nodes.items()}
        tree = frozenset(
            Placed(
                number,
                self._values(length, path),
                self._drafted.get((session._incarnation, number), ()),
            )
            for number, path in numbered
        )
        block = before if session._block is not None else None
        if session._block is not None and before is None:
            tokens = session._block.candidates
            if session._block.alternatives:  # of several paths the right one decides what is committed
                rows = session._block.path_along(self._text[length:])
                tokens = tuple(session._block.token_ids[row] for row in rows[1:]) or tokens[:1]
            block = self._values(length, tokens)
        return Target(
            committed=self._values(0, session.committed)[self._origin :],
            tree=tree,
            passed=frozenset((number, at - self._origin) for number, at in session._passed.items()),
            epoch=session.epoch,
            next_number=session._next_number,
            draft_base=session._draft_base - self._origin,
            attached=session.attached,
            incarnation=session._incarnation,
            block=block,
        )

    def _draft(self) -> Draft:
        session = self._harness.draft
        offered = sorted((node for node in session.root.below() if node.number), key=lambda node: node.number)
        return Draft(
            incarnation=session.incarnation,
            epoch=session.epoch,
            known=self._values(0, session.committed)[self._origin :],
            tree=tuple(self._node(node) for node in (*offered, *session._unsent)),
            next_number=session._next_number,
        )

    def _node(self, node: Node) -> Drafted:
        base, tokens = self._harness.draft.base, self._harness.prefix_of(node)
        path, prefix = self._values(base, tokens[base:]), self._values(0, tokens[:-1])[self._origin :]
        return Drafted(node.number, path, prefix)

    def _candidate(self, message: Candidate) -> protocol_model.Candidate:
        numbers = range(message.first, message.first + len(message.token_ids))
        prefixes = [self._drafted[message.incarnation, number] for number in numbers]
        values = [
            self._values(self._origin + len(prefix), [token_id])[0]
            for prefix, token_id in zip(prefixes, message.token_ids, strict=True)
        ]
        return protocol_model.Candidate(
            incarnation=message.incarnation,
            base=message.base - self._origin,
            first=message.first,
            parents=message.parents,
            tokens=tuple(Token(*token) for token in zip(values, prefixes, strict=True)),
        )

    def _verdict(self, message: Verdict) -> protocol_model.Verdict:
        return protocol_model.Verdict(
            incarnation=message.incarnation,
            epoch=message.epoch,
            start=message.start - self._origin,
            values=self._values(message.start, message.token_ids),
        )

    @property
    def _origin(self) -> int:
        return len(self._harness.prompt)

    def _values(self, start: int, token_ids: Sequence[int]) -> Values:
        """Renamed so that the target's token is 0 everywhere."""
        own = self._text[start : start + len(token_ids)]
        return tuple((token_id - right) % VOCAB_SIZE for token_id, right in zip(token_ids, own, strict=True))


def _extends(draft: Draft, before: Draft) -> bool:
    """It has more nodes, and nothing else is different."""
    same = before._replace(tree=()) == draft._replace(tree=())
    return same and draft.tree[: len(before.tree)] == before.tree


def _simulates(state: State, observed: State) -> bool:
    """The same sessions, and every message that is on its way there is on its way here."""
    return (
        (state.target, state.draft) == (observed.target, observed.draft)
        and observed.to_target <= state.to_target
        and observed.to_draft <= state.to_draft
    )
