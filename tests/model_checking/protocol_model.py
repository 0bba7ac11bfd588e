"""The protocol of `amusd/protocol` (one chain) as a transition system that is small enough to be explored completely.

Written from the rules in `docs/protocol.md` and on its own: it shares no code with the sessions. `conformance.py` ties
the two together.

What it leaves out, and why nothing is lost by that
    the prompt      Position 0 is the first token behind it.
    the text        The target's own token is 0 everywhere, and every other value is wrong. Tokens are compared with
                    others of the same position alone, so any text can be renamed to this one, position by position.
                    Whether a token stands where it belongs is told by its ghost, at which no rule looks.
    the hash        It is off: the epochs have to suffice.
    `more`, sizes   The draft may offer what it has, or nothing, whenever it likes.
    death           A dead draft is one that takes no more steps. `Open` is part of `attach`, as a draft that gets it
                    late is one that begins late.
    the end         Nothing is verified behind it, so that nothing follows it here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar


class Token(NamedTuple):
    value: int
    drafted_from: tuple[int, ...]
    """Ghost: everything before it in the draft's stream when it was drafted."""


class Candidate(NamedTuple):
    incarnation: int
    epoch: int
    base: int
    start: int
    tokens: tuple[Token, ...]


class Verdict(NamedTuple):
    incarnation: int
    floor: int
    start: int
    values: tuple[int, ...]


class Target(NamedTuple):
    committed: tuple[int, ...] = ()
    tail: tuple[Token, ...] = ()
    floor: int = 0
    chain_epoch: int = 0
    chain_end: int = 0
    draft_base: int = 0
    attached: bool = True
    incarnation: int = 1
    block: tuple[Token, ...] | None = None
    """The candidates of the pass under way."""


class Draft(NamedTuple):
    incarnation: int = 1
    epoch: int = 0
    known: tuple[int, ...] = ()
    """The committed tokens that it has heard of."""
    chain: tuple[Token, ...] = ()
    offered: int = 0
    """Position up to which the stream has been offered in this epoch."""


class State(NamedTuple):
    """Messages on their way are a set, and delivering takes none out: each may arrive late, again, or never."""

    target: Target = Target()
    draft: Draft = Draft()
    to_target: frozenset[Candidate] = frozenset()
    to_draft: frozenset[Verdict] = frozenset()


class Step(NamedTuple):
    action: str
    subject: Candidate | Verdict | Token | None
    """What is delivered, sent or proposed."""
    state: State
    """Where it leads."""


@dataclass(frozen=True)
class Bounds:
    max_length: int = 3
    max_lookahead: int = 2
    vocab_size: int = 2
    max_lives: int = 2
    """Lives of the draft, the first included."""
    max_epoch: int = 3
    """Losses can raise epochs without end; steps beyond this one are not followed."""
    max_in_flight: int | None = 2
    """Messages on their way in each direction: one more is lost, or takes the place of another. None: no limit."""


class Refused(Exception):  # noqa: N818 - an outcome
    """The session would raise `PeerProtocolError`."""


Message = TypeVar("Message", Candidate, Verdict)


def values_of(tokens: tuple[Token, ...]) -> tuple[int, ...]:
    return tuple([token.value for token in tokens])


def num_equal(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Length of the common prefix."""
    length = min(len(left), len(right))
    return next((i for i in range(length) if left[i] != right[i]), length)


def contradicts(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    return num_equal(left, right) < min(len(left), len(right))


class ProtocolModel:
    """Both sides and what is between them. A mutant overrides one rule."""

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
            yield Step("draft proposes", proposed.chain[-1], State(target, proposed, to_target, to_draft))
        offering, candidate = self.offer(draft)
        for channel in self._sent(to_target, candidate):
            yield Step("draft offers", candidate, State(target, offering, channel, to_draft))
        for action, after in self.steps_alone(target):
            if after.floor <= self.bounds.max_epoch:
                yield Step(action, None, State(after, draft, to_target, to_draft))
        if target.attached:
            verdict = self.verdict(target)
            for channel in self._sent(to_draft, verdict):
                yield Step("target sends", verdict, State(target, draft, to_target, channel))
            yield Step("target detaches", None, State(self.detach(target), draft, to_target, to_draft))
        if target.incarnation < self.bounds.max_lives:
            attached = self.attach(target)
            yield Step("target attaches a new life", None, State(attached, self.open(attached), to_target, to_draft))

    def steps_alone(self, target: Target) -> Iterator[tuple[str, Target]]:
        """Those for which the target needs nobody."""
        if target.block is not None:
            yield "target commits", self.commit(target)
        elif self.room(target) > 0:
            for begun in self.begin(target):
                yield "target begins", begun

    def without_spent(self, state: State) -> State:
        """Without messages that change nothing now, nor ever again: floors, epochs, bases and lives only go up."""
        target, draft, to_target, to_draft = state
        spent = [candidate for candidate in to_target if self.is_spent(target, candidate)]
        old = [verdict for verdict in to_draft if not self.is_news(draft, verdict)]
        return State(target, draft, to_target.difference(spent), to_draft.difference(old)) if spent or old else state

    # The target

    def room(self, target: Target) -> int:
        return self.bounds.max_length - len(target.committed)

    def is_addressed(self, target: Target, candidate: Candidate) -> bool:
        return target.attached and candidate.incarnation == target.incarnation

    def is_stale(self, target: Target, candidate: Candidate) -> bool:
        return candidate.epoch < max(target.floor, target.chain_epoch)

    def is_spent(self, target: Target, candidate: Candidate) -> bool:
        tells_base = candidate.base > target.draft_base
        return not self.is_addressed(target, candidate) or (self.is_stale(target, candidate) and not tells_base)

    def receive(self, target: Target, candidate: Candidate) -> Target:
        if not self.is_addressed(target, candidate):
            return target
        _, epoch, base, start, tokens = candidate
        length = len(target.committed)
        if base > length or start < base or start + len(tokens) > base + self.bounds.max_lookahead:
            raise Refused
        heard = target._replace(draft_base=max(target.draft_base, base))
        if self.is_stale(target, candidate):
            return heard
        if epoch != target.chain_epoch:
            heard = heard._replace(tail=(), chain_epoch=epoch, chain_end=base)
        stream = heard.committed + values_of(heard.tail)
        if contradicts(stream[max(start, length) :], values_of(tokens)[max(0, length - start) :]):
            raise Refused
        known_end = max(heard.chain_end, base)
        if not self.connects(start, known_end) or self.is_contradicted(heard, candidate):
            return self.break_chain(heard)
        tail = heard.tail + tokens[max(0, len(stream) - start) :]
        return heard._replace(tail=tail, chain_end=max(known_end, start + len(tokens)))

    def connects(self, start: int, known_end: int) -> bool:
        return start <= known_end

    def is_contradicted(self, target: Target, candidate: Candidate) -> bool:
        return contradicts(target.committed[candidate.start :], values_of(candidate.tokens))

    def break_chain(self, target: Target) -> Target:
        return target._replace(tail=(), floor=max(target.floor, target.chain_epoch + 1))

    def begin(self, target: Target) -> Iterator[Target]:
        """A pass over the first few candidates, or over none."""
        for number in range(min(len(target.tail), self.room(target) - 1) + 1):
            yield target._replace(block=target.tail[:number])

    def judged(self, target: Target) -> tuple[Token, ...]:
        """The block and, if it is there by now, the candidate behind it."""
        assert target.block is not None
        tail = target.tail[: len(target.block) + 1]
        return tail if values_of(tail)[: len(target.block)] == values_of(target.block) else target.block

    def choose(self, target: Target) -> tuple[int, ...]:
        """What the pass commits: what it accepts, then one token of the target's own where it has scored one."""
        assert target.block is not None
        own = (0,) * (len(target.block) + 1)
        num_accepted = num_equal(values_of(self.judged(target)), own)
        return own[: min(num_accepted + 1, self.room(target))]

    def commit(self, target: Target) -> Target:
        values = self.choose(target)
        after = target._replace(committed=target.committed + values, tail=target.tail[len(values) :], block=None)
        return self.reject(after) if contradicts(values_of(target.tail), values) else after

    def reject(self, target: Target) -> Target:
        return self.break_chain(target)

    def verdict(self, target: Target) -> Verdict:
        return Verdict(target.incarnation, target.floor, target.draft_base, target.committed[target.draft_base :])

    def detach(self, target: Target) -> Target:
        return target._replace(tail=(), attached=False)

    def attach(self, target: Target) -> Target:
        length = len(target.committed)
        fresh = Target(chain_end=length, draft_base=length, incarnation=target.incarnation + 1)
        return fresh._replace(committed=target.committed, block=target.block)

    # The draft

    def open(self, target: Target) -> Draft:
        return Draft(incarnation=target.incarnation, known=target.committed, offered=len(target.committed))

    def propose(self, draft: Draft) -> Iterator[Draft]:
        stream = draft.known + values_of(draft.chain)
        if len(stream) < min(len(draft.known) + self.bounds.max_lookahead, self.bounds.max_length - 1):
            for value in range(self.bounds.vocab_size):
                yield draft._replace(chain=(*draft.chain, Token(value, stream)))

    def offer(self, draft: Draft) -> tuple[Draft, Candidate]:
        base = len(draft.known)
        candidate = Candidate(draft.incarnation, draft.epoch, base, draft.offered, draft.chain[draft.offered - base :])
        return draft._replace(offered=base + len(draft.chain)), candidate

    def is_news(self, draft: Draft, verdict: Verdict) -> bool:
        base, end = len(draft.known), verdict.start + len(verdict.values)
        is_newer = end > base or (end == base and verdict.floor > draft.epoch)
        return verdict.incarnation == draft.incarnation and is_newer

    def hear(self, draft: Draft, verdict: Verdict) -> Draft:
        if not self.is_news(draft, verdict):
            return draft
        base, end = len(draft.known), verdict.start + len(verdict.values)
        values = verdict.values[base - verdict.start :]
        is_too_long = end > self.bounds.max_length
        if verdict.start > base or is_too_long or contradicts(draft.known[verdict.start :], verdict.values):
            raise Refused
        rollback = contradicts(values_of(draft.chain), values)
        epoch = max(self.epoch_after(draft, rollback), verdict.floor)
        chain = self.chain_after_rollback(draft, values) if rollback else draft.chain[len(values) :]
        offered = end if rollback else self.offered_after(draft, end, epoch)
        return draft._replace(epoch=epoch, known=draft.known + values, chain=chain, offered=offered)

    def epoch_after(self, draft: Draft, rollback: bool) -> int:
        return draft.epoch + rollback

    def chain_after_rollback(self, draft: Draft, values: tuple[int, ...]) -> tuple[Token, ...]:
        return ()

    def offered_after(self, draft: Draft, end: int, epoch: int) -> int:
        """In a new epoch the tail is offered again."""
        return max(draft.offered, end) if epoch == draft.epoch else end

    # What is on its way

    def _deliveries(self, state: State) -> Iterator[Step]:
        target, draft, to_target, to_draft = state
        for candidate in to_target:
            try:
                received = self.receive(target, candidate)
            except Refused:
                yield Step("target refuses", candidate, state)
                continue
            if received.floor <= self.bounds.max_epoch:
                yield Step("target receives", candidate, State(received, draft, to_target, to_draft))
        for verdict in to_draft:
            try:
                heard = self.hear(draft, verdict)
            except Refused:
                yield Step("draft refuses", verdict, state)
                continue
            if heard.epoch <= self.bounds.max_epoch:
                yield Step("draft hears", verdict, State(target, heard, to_target, to_draft))

    def _sent(self, channel: frozenset[Message], message: Message) -> Iterator[frozenset[Message]]:
        limit = self.bounds.max_in_flight
        if limit is None or message in channel or len(channel) < limit:
            yield channel | {message}
            return
        yield channel
        for lost in channel:
            yield channel - {lost} | {message}
