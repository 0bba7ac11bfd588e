"""Breadth-first search over all states of a model. What it finds is a shortest way to a breach, as a readable trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from model_checking.invariants import PROTOCOL, Breach, Invariants
from model_checking.protocol_model import ProtocolModel, State, Step


@dataclass(frozen=True)
class Exploration:
    states: AbstractSet[State] = field(repr=False)
    actions: Counter[str]
    breach: Breach | None = None
    trace: tuple[str, ...] = ()

    @property
    def num_states(self) -> int:
        return len(self.states)

    @property
    def num_edges(self) -> int:
        return self.actions.total()

    def __str__(self) -> str:
        verdict = ": ".join(self.breach) if self.breach else "every invariant holds"
        steps = [f"{number:4}. {line}" for number, line in enumerate(self.trace, 1)]
        return "\n".join([*steps, f"{self.num_states:,} states, {self.num_edges:,} edges: {verdict}"])


def explore(model: ProtocolModel, invariants: tuple[str, ...] = PROTOCOL) -> Exploration:
    checks = Invariants(model, invariants)
    actions: Counter[str] = Counter()
    start = State()
    parents: dict[State, State | None] = {start: None}
    frontier = [start]
    while frontier:
        reached = []
        for state in frontier:
            for step in model.steps(state):
                actions[step.action] += 1
                breach = checks.first_breach(state, step)
                if breach:
                    trace = _trace(model, parents, state, step)
                    return Exploration(parents.keys(), actions, breach, trace)
                after = model.without_spent(step.state)
                if after not in parents:
                    parents[after] = state
                    reached.append(after)
        frontier = reached
    return Exploration(parents.keys(), actions)


def _trace(model: ProtocolModel, parents: dict[State, State | None], state: State, last: Step) -> tuple[str, ...]:
    lines = [describe(last)]
    while (parent := parents[state]) is not None:
        lines.append(next(describe(step) for step in model.steps(parent) if model.without_spent(step.state) == state))
        state = parent
    return tuple(reversed(lines))


def describe(step: Step) -> str:
    subject = step.state.target if step.subject is None else step.subject
    return f"{step.action}: {subject}"
