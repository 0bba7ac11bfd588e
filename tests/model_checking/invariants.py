"""The invariants of every state and every step of the model. Each breach is a name and a description."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from model_checking.protocol_model import Draft, ProtocolModel, State, Step, Target

PROTOCOL = ("I1", "I2", "I3", "I4", "I5", "I6", "L1")
NO_REFUSAL = "no refusal"

Breach = tuple[str, str]


class Invariants:
    def __init__(self, model: ProtocolModel, names: tuple[str, ...]) -> None:
        self._model = model
        self._names = names
        # The same target is found in many states.
        self._in_target = lru_cache(None)(lambda target: tuple(self._breaches_in(target)))
        self._finishes_alone = lru_cache(None)(self._search_alone)

    def first_breach(self, before: State, step: Step) -> Breach | None:
        if step.action.endswith("refuses"):
            return self._first([(NO_REFUSAL, f"{step.subject} is refused")])
        target, draft = step.state.target, step.state.draft
        if target is before.target and draft is before.draft:
            return None
        return self._first(self._breaches(before, target, draft))

    def _first(self, breaches: Iterable[Breach]) -> Breach | None:
        return next((breach for breach in breaches if breach[0] in self._names), None)

    def _breaches(self, before: State, target: Target, draft: Draft) -> Iterator[Breach]:
        if target is not before.target:
            yield from self._across_target(before.target, target)
            yield from self._in_target(target)
        if draft is not before.draft:
            yield from self._across_draft(before.draft, draft)
            if draft.known != target.committed[: len(draft.known)]:
                yield "I4", f"the draft takes {draft.known} for committed, the target has {target.committed}"

    def _across_target(self, before: Target, after: Target) -> Iterator[Breach]:
        if after.committed[: len(before.committed)] != before.committed:
            yield "I1", f"{before.committed} was committed, and now {after.committed}"
        if after.incarnation == before.incarnation and after.epoch < before.epoch:
            yield "I3", f"the target's epoch goes back from {before.epoch} to {after.epoch}"

    def _across_draft(self, before: Draft, after: Draft) -> Iterator[Breach]:
        if after.incarnation != before.incarnation:
            return
        if after.epoch < before.epoch:
            yield "I3", f"the draft's epoch goes back from {before.epoch} to {after.epoch}"
        if len(after.known) < len(before.known):
            yield "I4", f"the draft's base goes back from {len(before.known)} to {len(after.known)}"

    def _breaches_in(self, target: Target) -> Iterator[Breach]:
        if any(target.committed):
            yield "I2", f"{target.committed} is committed, 0 is the target's token everywhere"
        if len(target.committed) > self._model.bounds.max_length:
            yield "I5", f"{len(target.committed)} tokens are committed, the limit is {self._model.bounds.max_length}"
        for node in target.tree:
            prefix = target.committed + node.path[:-1]
            if node.drafted_from != prefix:
                yield "I6", f"{node.path[-1]} was drafted from {node.drafted_from}, stands after {prefix}"
        if not self._finishes_alone(target):
            yield "L1", "the target cannot finish without the draft"

    def _search_alone(self, target: Target) -> bool:
        if self._model.room(target) < 1:
            return True
        return any(self._finishes_alone(after) for _, after in self._model.steps_alone(target))
