"""Follows a run of the real sessions through the model: whatever they do has to be a step of it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from model_checking import protocol_model
from model_checking.protocol_model import Bounds, Draft, ProtocolModel, State, Target, Token
from protocol.harness import Harness
from protocol.schedule import VOCAB_SIZE, oracle_text

from amusd.protocol.messages import Candidate, Verdict

ACTIONS = (
    "lose_draft",
    "restart_draft",
    "propose",
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
        self._model = ProtocolModel(
            Bounds(
                max_length=harness.max_length - len(harness.prompt),
                max_lookahead=harness.max_lookahead,
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
        """The model proposes token by token, commits before it sends the verdict, and does nothing behind the end."""
        before = self.state
        if self._model.room(after.target) < 1:
            yield State(after.target, before.draft)
            return
        proposed = after.draft.chain[len(before.draft.chain) :]
        if before.draft._replace(chain=after.draft.chain) == after.draft:
            for number in range(1, len(proposed)):
                chain = before.draft.chain + proposed[:number]
                yield before._replace(draft=after.draft._replace(chain=chain))
        if before.draft == after.draft:
            yield after._replace(to_draft=frozenset())
        yield after

    # What the sessions look like in the model's terms

    def _observed(self) -> State:
        candidates = self._harness.to_target.on_its_way
        verdicts = self._harness.to_draft.on_its_way
        return State(
            self._target(),
            self._draft(),
            frozenset(self._candidate(candidate, ghosts) for candidate, ghosts in candidates),
            frozenset(self._verdict(verdict) for verdict in verdicts),
        )

    def _target(self) -> Target:
        session, before = self._harness.target, self.state.target.block
        length = session.committed_length
        tail = session._stream.tail
        ghosts = [self._harness.ghosts.get(position, ()) for position in range(length, length + len(tail))]
        tokens = self._tokens(length, tail, ghosts)
        block = None
        if session._block is not None:
            block = before if before is not None else tokens[: len(session._block.candidates)]
        return Target(
            committed=self._values(0, session.committed)[self._origin :],
            tail=tokens,
            floor=session.epoch_floor,
            chain_epoch=session._chain_epoch,
            chain_end=session._chain_end - self._origin,
            draft_base=session._draft_base - self._origin,
            attached=session.attached,
            incarnation=session._incarnation,
            block=block,
        )

    def _draft(self) -> Draft:
        session = self._harness.draft
        chain = session.token_ids[session.base :]
        ghosts = [self._harness.drafted_from.get(position, ()) for position in range(session.base, session.length)]
        return Draft(
            incarnation=session.incarnation,
            epoch=session.epoch,
            known=self._values(0, session.token_ids[: session.base])[self._origin :],
            chain=self._tokens(session.base, chain, ghosts),
            offered=session._offered_length - self._origin,
        )

    def _candidate(self, message: Candidate, ghosts: Sequence[tuple[int, ...]]) -> protocol_model.Candidate:
        return protocol_model.Candidate(
            incarnation=message.incarnation,
            epoch=message.epoch,
            base=message.base - self._origin,
            start=message.start - self._origin,
            tokens=self._tokens(message.start, message.token_ids, ghosts),
        )

    def _verdict(self, message: Verdict) -> protocol_model.Verdict:
        return protocol_model.Verdict(
            incarnation=message.incarnation,
            floor=message.epoch_floor,
            start=message.start - self._origin,
            values=self._values(message.start, message.token_ids),
        )

    @property
    def _origin(self) -> int:
        return len(self._harness.prompt)

    def _values(self, start: int, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Renamed so that the target's token is 0 everywhere."""
        own = self._text[start : start + len(token_ids)]
        return tuple((token_id - right) % VOCAB_SIZE for token_id, right in zip(token_ids, own, strict=True))

    def _tokens(self, start: int, token_ids: Sequence[int], ghosts: Sequence[tuple[int, ...]]) -> tuple[Token, ...]:
        values = self._values(start, token_ids)
        prefixes = [self._values(0, ghost)[self._origin :] for ghost in ghosts]
        return tuple(Token(*token) for token in zip(values, prefixes, strict=True))


def _simulates(state: State, observed: State) -> bool:
    """The same sessions, and every message that is on its way there is on its way here."""
    return (
        (state.target, state.draft) == (observed.target, observed.draft)
        and observed.to_target <= state.to_target
        and observed.to_draft <= state.to_draft
    )
