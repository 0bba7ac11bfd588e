"""The model with one rule broken, each in a way of its own."""

from __future__ import annotations

from collections.abc import Iterator

from model_checking.protocol_model import (
    Candidate,
    Draft,
    Placed,
    ProtocolModel,
    Target,
    Token,
    Values,
    Verdict,
)


class NoIncarnation(ProtocolModel):
    """Nobody looks at the incarnation."""

    def is_addressed(self, target: Target, candidate: Candidate) -> bool:
        return target.attached

    def is_news(self, draft: Draft, verdict: Verdict) -> bool:
        return super().is_news(draft, verdict._replace(incarnation=draft.incarnation))


class TreeKept(ProtocolModel):
    """The target keeps what follows a rejected candidate."""

    def survives(self, node: Placed, values: Values) -> bool:
        return True


class OrphansTaken(ProtocolModel):
    """A node whose parent was contradicted, or lost, hangs behind the end of the text."""

    def place_orphan(self, target: Target, number: int, token: Token) -> Target:
        return self.hang(target, number, (token.value,), token)


class OldVerdictHeard(ProtocolModel):
    """The draft goes back to what an old verdict says."""

    def is_news(self, draft: Draft, verdict: Verdict) -> bool:
        return verdict.incarnation == draft.incarnation

    def hear(self, draft: Draft, verdict: Verdict) -> Draft:
        end = verdict.start + len(verdict.values)
        if end >= len(draft.known) or not self.is_news(draft, verdict):
            return super().hear(draft, verdict)
        return draft._replace(epoch=max(draft.epoch, verdict.epoch), known=draft.known[:end], tree=())


class DoubleBonus(ProtocolModel):
    """Behind a block of which all is accepted, the target commits two tokens of its own."""

    def choose(self, target: Target) -> Values:
        values = super().choose(target)
        return (*values, 0) if len(values) > len(target.block or ()) else values


class DraftNeeded(ProtocolModel):
    """No pass without a candidate."""

    def begin(self, target: Target) -> Iterator[Target]:
        return (begun for begun in super().begin(target) if begun.block)


class LateCandidateUnjudged(ProtocolModel):
    """The target commits a candidate behind the block in place of a token of its own."""

    def choose(self, target: Target) -> Values:
        values, block = super().choose(target), target.block or ()
        late = [node.path[-1] for node in target.tree if node.path[:-1] == block]
        return (*values[:-1], max(late)) if late and len(values) > len(block) else values


class TokenTakenBack(ProtocolModel):
    """The target takes its last token back when a new life begins."""

    def attach(self, target: Target) -> Target:
        return super().attach(target._replace(committed=target.committed[:-1]))


class VerdictNotCumulative(ProtocolModel):
    """A verdict carries the last token alone."""

    def verdict(self, target: Target) -> Verdict:
        start = max(target.draft_base, len(target.committed) - 1)
        return super().verdict(target)._replace(start=start, values=target.committed[start:])
