"""Tiny real runs, for what is made of their events: two workers on threads over table models."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from oracle import OracleDrafter
from runtime.pair import PROMPT, VOCAB_SIZE, Factories, decoding, pair, params, reference
from runtime.table_tree import TableTreeDrafter, spread

from amusd.answer import Generation
from amusd.config import DecodingConfig
from amusd.drafters.synthetic import right_with_probability
from amusd.protocol.draft_session import Guesses, Node
from amusd.tracing.events import EVENTS, Event
from amusd.tracing.recorder import Recorder, as_format
from amusd.tracing.timeline import Timeline
from amusd.types import Mode

NUM_TOKENS = 40


class PacedOracle(OracleDrafter):
    def propose(self, path: Sequence[int], room: int) -> tuple[int, ...]:
        time.sleep(0.001)
        return super().propose(path, room)


@dataclass(frozen=True)
class Run:
    target: tuple[Event, ...]
    draft: tuple[Event, ...]
    answers: tuple[Generation, ...]

    @property
    def timeline(self) -> Timeline:
        return Timeline.of(self.target, self.draft)

    def write(self, directory: Path) -> Path:
        for role, events in (("target", self.target), ("draft", self.draft)):
            recorder = Recorder(role, f"{as_format(directory)}/events")
            for event in events[1:]:  # the recorder has begun with its own worker event
                recorder.span(event.name, event.start_ns, event.end_ns, event.sequence_id, **event.fields)
            recorder.flush()
        return directory


def run(*schedules: DecodingConfig) -> Run:
    """One answer for each of `schedules`, with a draft that is right with probability 0.7."""
    known = reference(NUM_TOKENS + 20)
    schedule = right_with_probability(0.7, 5)
    return recorded({"oracle": lambda: PacedOracle(known, schedule, VOCAB_SIZE)}, schedules)


class PacedTree(TableTreeDrafter):
    def expand(self, root: Node, nodes: Sequence[Node], room: int = 1) -> list[Guesses]:
        time.sleep(0.001)
        return super().expand(root, nodes)


def run_branching(**changes: object) -> Run:
    schedule = decoding(Mode.ASYNCHRONOUS, 8, policy="branching", fan_out=3, rows_per_step=3, **changes)
    return recorded({"tree": lambda: PacedTree(places=spread(4, 0.5, 0.3))}, [schedule] * 2)


def recorded(factories: Factories, schedules: Sequence[DecodingConfig]) -> Run:
    with pair(factories, pass_seconds=0.004) as (engine, draft):
        answers = [engine.generate(PROMPT, params(NUM_TOKENS), decoding=each) for each in schedules]
        target = engine.worker.recorder
    assert draft.error is None
    return Run(target.events, draft.recorder.events, tuple(answers))


def asynchronous(**changes: object) -> DecodingConfig:
    return decoding(Mode.ASYNCHRONOUS, 8, **{"policy": "chain", **changes})


def synchronous(length: int = 4) -> DecodingConfig:
    return decoding(Mode.SYNCHRONOUS, length)


def plain() -> DecodingConfig:
    return decoding(Mode.AUTOREGRESSIVE)


def named(events: Sequence[Event], name: str) -> list[Event]:
    return [event for event in events if event.name == name]


def made(name: str, start_ns: int, end_ns: int, sequence_id: int = 1, **fields: Any) -> Event:
    kind = EVENTS[name]
    needed = {field.name: 0 for field in msgspec.structs.fields(kind)[3:] if field.required}
    return kind(start_ns, end_ns, sequence_id, **{**needed, **fields})
