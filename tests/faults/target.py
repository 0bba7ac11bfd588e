"""The real target worker, watched: what is committed, what is evaluated, and how long it waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from faults.models import HashCache
from faults.watch import Violation, Watch
from faults.weather import Weather
from faults.world import World

from amusd.protocol.messages import Candidate
from amusd.protocol.target_session import Reception, TargetSession
from amusd.protocol.verification import Block, PassOutcome
from amusd.runtime.draft_line import DraftLine
from amusd.runtime.request import Request
from amusd.runtime.target_worker import TargetWorker
from amusd.sampling.stopping import Emission, StopChecker


@dataclass(kw_only=True)
class WatchedLine(DraftLine):
    """A target's line to its draft, and what comes over it."""

    world: World
    weather: Weather
    watch: Watch
    delayed_ns: int = 0
    """So long the target has stood still in all."""

    def _open(self) -> None:
        super()._open()
        self.watch.attached()
        self.watch.committed(self._session)

    def drain(self) -> None:
        if self.weather.target_stops_for_ns:
            duration_ns, self.weather.target_stops_for_ns = self.weather.target_stops_for_ns, 0
            self.world.advance(duration_ns)
            self.delayed_ns += duration_ns
        super().drain()
        if self._session._block is not None:
            self.watch.evaluated(self._session, self._session.candidates_to_judge())

    def _receive_candidate(self, message: Candidate) -> str:
        assert self.peer is not None
        if message.incarnation != self.peer.incarnation:
            self.world.counts["candidate of an earlier life"] += 1
        elif message.sequence_id != self._session.sequence_id:
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

    line: WatchedLine
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

    def _new_session(self, request: Request) -> TargetSession:
        session = super()._new_session(request)
        defect = self.defects.get(type(session))
        if defect is not None:
            session.__class__ = defect  # its state is that of the real one
        return session

    def _next_block(self, session: TargetSession, request: Request) -> Block:
        self._ready_ns, self._num_waits = self.world.now_ns - self.line.delayed_ns, 0
        block = super()._next_block(session, request)
        self.watch.evaluated(session, block.candidates)
        self.watch.scored(session, block)
        self.world.counts["alternative scored"] += len(block.alternatives)
        return block

    def _wait(self, session: TargetSession, seconds: float, reason: dict[str, str]) -> None:
        super()._wait(session, seconds, reason)
        self._num_waits += 1
        self.watch.waited(self.world.now_ns - self.line.delayed_ns - self._ready_ns, self._num_waits)

    def _verify(self, session: TargetSession, cache: HashCache, block: Block, stop: StopChecker) -> Emission:
        emission = super()._verify(session, cache, block, stop)
        self.watch.committed(session)
        return emission

    def _pass_done(self, session: TargetSession, start_ns: int, end_ns: int, outcome: PassOutcome) -> None:
        super()._pass_done(session, start_ns, end_ns, outcome)
        self.world.counts["alternative accepted"] += outcome.num_rescued
        self.num_passes += 1
        self.num_accepted += outcome.num_accepted
        self.world.note(f"pass {outcome.num_candidates} {outcome.num_accepted} {session.committed_length}")
