"""The model with one rule broken, each in a way of its own."""

from __future__ import annotations

from collections.abc import Iterator

from model_checking.protocol_model import (
    Candidate,
    Draft,
    ProtocolModel,
    State,
    Step,
    Target,
    Token,
    Verdict,
    num_equal,
    values_of,
)


class NoIncarnation(ProtocolModel):
    """Nobody looks at the incarnation."""

    def is_addressed(self, target: Target, candidate: Candidate) -> bool:
        return target.attached

    def is_news(self, draft: Draft, verdict: Verdict) -> bool:
        return super().is_news(draft, verdict._replace(incarnation=draft.incarnation))


class RejectionKeepsEpoch(ProtocolModel):
    """The floor does not rise on a rejection."""

    def reject(self, target: Target) -> Target:
        return target._replace(tail=())


class LateContradictionIgnored(ProtocolModel):
    """A bonus token, or one of a pass without candidates, is not compared with the chain's own that arrives later."""

    def is_contradicted(self, target: Target, candidate: Candidate) -> bool:
        return False


class EpochIgnored(ProtocolModel):
    """The target takes candidates from before a rollback."""

    def is_stale(self, target: Target, candidate: Candidate) -> bool:
        return False


class PositionIgnored(ProtocolModel):
    """The target takes candidates wherever they start."""

    def connects(self, start: int, known_end: int) -> bool:
        return True


class SpeculationKept(ProtocolModel):
    """The draft goes on behind a token that was rejected."""

    def chain_after_rollback(self, draft: Draft, values: tuple[int, ...]) -> tuple[Token, ...]:
        return draft.chain[len(values) :]


class TailKept(ProtocolModel):
    """The target keeps what follows a rejected candidate."""

    def reject(self, target: Target) -> Target:
        return super().reject(target)._replace(tail=target.tail)


class ChainKeptOverRestart(ProtocolModel):
    """The target takes the new life for the continuation of the old one, at the same epoch."""

    def attach(self, target: Target) -> Target:
        kept = {"floor": target.floor, "chain_epoch": target.chain_epoch, "chain_end": target.chain_end}
        return super().attach(target)._replace(**kept)


class OldVerdictHeard(ProtocolModel):
    """The draft goes back to what an old verdict says."""

    def is_news(self, draft: Draft, verdict: Verdict) -> bool:
        return verdict.incarnation == draft.incarnation

    def hear(self, draft: Draft, verdict: Verdict) -> Draft:
        end = verdict.start + len(verdict.values)
        if end >= len(draft.known):
            return super().hear(draft, verdict)
        return draft._replace(epoch=max(draft.epoch, verdict.floor), known=draft.known[:end], chain=(), offered=end)


class DoubleBonus(ProtocolModel):
    """Behind a block of which all is accepted, the target commits two tokens of its own."""

    def choose(self, target: Target) -> tuple[int, ...]:
        values = super().choose(target)
        return (*values, 0) if len(values) > len(target.block or ()) else values


class Overshoot(ProtocolModel):
    """The target believes in room for one more token."""

    def room(self, target: Target) -> int:
        return super().room(target) + 1


class DraftNeeded(ProtocolModel):
    """No pass without a candidate."""

    def begin(self, target: Target) -> Iterator[Target]:
        return (begun for begun in super().begin(target) if begun.block)


class FloorPlusOne(ProtocolModel):
    """`floor + 1` instead of `max(floor, epoch + 1)`."""

    def break_chain(self, target: Target) -> Target:
        return target._replace(tail=(), floor=target.floor + 1)


class EpochKeptOnRollback(ProtocolModel):
    """The draft throws tokens away and does not raise its epoch."""

    def epoch_after(self, draft: Draft, rollback: bool) -> int:
        return draft.epoch


class HeardWhileGone(ProtocolModel):
    """The target takes what a draft sent that it has detached."""

    def is_addressed(self, target: Target, candidate: Candidate) -> bool:
        return candidate.incarnation == target.incarnation


class LateCandidateUnjudged(ProtocolModel):
    """The target commits the candidate behind the block in place of a token of its own."""

    def choose(self, target: Target) -> tuple[int, ...]:
        values, judged = super().choose(target), self.judged(target)
        all_accepted = num_equal(values, values_of(judged)) == len(values) - 1 == len(target.block or ())
        return values_of(judged) if all_accepted and len(judged) == len(values) else values


class TokenTakenBack(ProtocolModel):
    """The target takes its last token back when a new life begins."""

    def attach(self, target: Target) -> Target:
        return super().attach(target._replace(committed=target.committed[:-1]))


class FloorTakenForEpoch(ProtocolModel):
    """A draft that throws nothing away takes the target's floor for its epoch, also a lower one."""

    def hear(self, draft: Draft, verdict: Verdict) -> Draft:
        heard = super().hear(draft, verdict)
        return heard if heard.epoch > draft.epoch or heard == draft else heard._replace(epoch=verdict.floor)


class VerdictNotCumulative(ProtocolModel):
    """A verdict carries the last token alone."""

    def verdict(self, target: Target) -> Verdict:
        start = max(target.draft_base, len(target.committed) - 1)
        return super().verdict(target)._replace(start=start, values=target.committed[start:])


class RestartGuessesEpoch(ProtocolModel):
    """A new life begins at any epoch."""

    def steps(self, state: State) -> Iterator[Step]:
        for step in super().steps(state):
            yield step
            if step.action == "target attaches a new life":
                for epoch in range(1, self.bounds.max_epoch + 1):
                    yield step._replace(state=step.state._replace(draft=step.state.draft._replace(epoch=epoch)))


class LostNotOfferedAgain(ProtocolModel):
    """In a new epoch the draft offers only what is new, not the tail that the target lacks."""

    def offered_after(self, draft: Draft, end: int, epoch: int) -> int:
        return max(draft.offered, end)
