"""The real target worker, watched: what is committed, what is evaluated, and how long it waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from faults.watch import Violation, Watch
from faults.weather import Weather
from faults.world import World

from amusd.policies.base import Wait
from amusd.protocol.messages import Candidate
from amusd.protocol.target_session import Reception
from amusd.protocol.verification import Block
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.target_sequence import Request, TargetSequence
from amusd.runtime.target_worker import TargetWorker
from amusd.sampling.stopping import Emission, StopChecker


@dataclass(kw_only=True)
class WatchedClient(DraftClient):
    """A target's client of its draft, and what comes through it."""

    world: World
    weather: Weather
    watch: Watch
    delayed_ns: int = 0
    """So long the target has stood still in all."""

    def _attach(self, sequence: TargetSequence) -> None:
        super()._attach(sequence)
        self.watch.attached()
        self.watch.committed(sequence.session)

    def drain(self) -> None:
        if self.weather.target_stops_for_ns:
            duration_ns, self.weather.target_stops_for_ns = self.weather.target_stops_for_ns, 0
            self.world.advance(duration_ns)
            self.delayed_ns += duration_ns
        super().drain()
        for sequence in self._sequences.values():
            if sequence.session._block is not None:
                self.watch.evaluated(sequence.session, sequence.session.candidates_to_judge())

    def _receive_candidate(self, message: Candidate) -> str:
        assert self.peer is not None
        if message.incarnation != self.peer.incarnation:
            self.world.counts["candidate of an earlier life"] += 1
        elif message.sequence_id not in self._sequences:
            self.world.counts["candidate of an earlier answer"] += 1
        else:
            self.watch.received(message)
        reception = super()._receive_candidate(message)
        self.world.happened(f"reception {reception}")
        if reception in ("refused", Reception.FOREIGN.value):
            raise Violation(f"honesty: {message} of an honest draft was taken for {reception}")
        return reception


@dataclass
class WatchedTarget(TargetWorker):
    """A target worker whose sessions may be replaced by a defective class."""

    client: WatchedClient
    world: World = field(kw_only=True)
    watch: Watch = field(kw_only=True)
    defects: Mapping[type, Any] = field(kw_only=True)
    """Real session class -> the one to put in its place."""
    num_passes: int = 0
    num_accepted: int = 0
    num_refused: int = 0
    num_stale: int = 0
    _ready_ns: int = 0
    """When the next pass could begin, time that the target stood still left out."""
    _num_waits: int = 0
    """Since then."""

    def _admit(self, request: Request, stop: StopChecker) -> TargetSequence:
        sequence = super()._admit(request, stop)
        defect = self.defects.get(type(sequence.session))
        if defect is not None:
            sequence.session.__class__ = defect  # its state is that of the real one
        return sequence

    def _next_block(self, sequence: TargetSequence) -> Block:
        self._ready_ns, self._num_waits = self.world.now_ns - self.client.delayed_ns, 0
        block = super()._next_block(sequence)
        self.watch.evaluated(sequence.session, block.candidates)
        self.watch.scored(sequence.session, block)
        self.world.counts["alternative scored"] += len(block.alternatives)
        return block

    def _wait(self, sequence: TargetSequence, decision: Wait) -> None:
        super()._wait(sequence, decision)
        self._num_waits += 1
        self.watch.waited(self.world.now_ns - self.client.delayed_ns - self._ready_ns, self._num_waits)

    def _verify(self, sequence: TargetSequence, block: Block) -> Emission:
        tally = sequence.tally
        before = tally._num_accepted, tally._num_accepted_alternatives
        emission = super()._verify(sequence, block)
        self.watch.committed(sequence.session)
        num_accepted = tally._num_accepted - before[0]
        self.world.counts["alternative accepted"] += tally._num_accepted_alternatives - before[1]
        self.num_passes += 1
        self.num_accepted += num_accepted
        self.world.note(f"pass {len(block.candidates)} {num_accepted} {sequence.session.committed_length}")
        return emission
