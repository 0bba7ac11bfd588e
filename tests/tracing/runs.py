"""Events that are made up, and runs of the real workers on virtual time."""

from __future__ import annotations

from typing import Any

import msgspec
from simulation.builders import PLAIN, branching, chain, costs, simulator

from amusd.simulation.simulator import Outcome
from amusd.tracing.events import EVENT_CLASSES, Event, EventName
from amusd.tracing.timeline import Timeline

MACHINE = simulator(0.7, costs(6, delay=0.05, spread=0.1), num_tokens=40)
SCHEDULES = {"plain": PLAIN, "asynchronous": chain(2), "branching": branching(1)}


def simulated(name: str) -> tuple[Outcome, Timeline]:
    """One answer under a schedule."""
    outcome = MACHINE.run(SCHEDULES[name])
    return outcome, outcome.timeline.by_sequence()[1]


def made(name: EventName, start_ns: int, end_ns: int, sequence_id: int = 1, **fields: Any) -> Event:
    kind = EVENT_CLASSES[name]
    needed = {field.name: 0 for field in msgspec.structs.fields(kind)[4:] if field.required}
    return kind(name, start_ns, end_ns, sequence_id, **{**needed, **fields})
