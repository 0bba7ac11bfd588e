"""The real target worker under watch: its committed tokens, its evaluated tokens, and its waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from faults.watch import Violation, Watch
from faults.weather import Weather
from faults.world import World
from protocol.sessions import Unhashed

from amusd.models.passes import ModelOutput
from amusd.policies.base import Wait
from amusd.policies.observer import PassTimes
from amusd.protocol.messages import Candidate
from amusd.protocol.verification import PassOutcome
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.target_sequence import TargetSequence
from amusd.runtime.target_worker import TargetWorker
from amusd.runtime.verifier import Request
from amusd.sampling.stopping import StopChecker
from amusd.tracing.events import Event, MessageEvent


@dataclass(kw_only=True)
class WatchedClient(DraftClient):
    world: World
    weather: Weather
    watch: Watch
    is_bare: bool
    delayed_ns: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recorder.listeners += (self._saw,)

    def open(self, sequence: TargetSequence) -> None:
        if self.is_bare:
            sequence.session.__class__ = Unhashed  # its state is that of the real one
        super().open(sequence)

    def _attach(self, sequence: TargetSequence) -> None:
        super()._attach(sequence)
        self.watch.attached(sequence.session)
        self.watch.committed(sequence.session)

    def close(self, sequence: TargetSequence) -> None:
        self.watch.over.add(sequence.sequence_id)
        super().close(sequence)

    def drain(self) -> None:
        if self.weather.target_stops_for_ns:
            duration_ns, self.weather.target_stops_for_ns = self.weather.target_stops_for_ns, 0
            self.world.advance(duration_ns)
            self.delayed_ns += duration_ns
        super().drain()
        for sequence in self._sequences.values():
            if sequence.session._block is not None:
                self.watch.evaluated(sequence.session, sequence.session.to_judge()[0])

    def _receive_candidate(self, message: Candidate) -> None:
        if message.incarnation != self.connection.incarnation:
            self.world.counts["candidate of an earlier incarnation"] += 1
        elif message.sequence_id not in self._sequences:
            self.world.counts["candidate of an earlier answer"] += 1
        else:
            self.watch.received(message)
        super()._receive_candidate(message)

    def _saw(self, event: Event) -> None:
        if isinstance(event, MessageEvent) and event.reception is not None:
            self.world.happened(f"reception {event.reception}")
            if event.reception == "refused":
                raise Violation(f"honesty: {event} of an honest draft was refused")


@dataclass
class WatchedTarget(TargetWorker):
    client: WatchedClient
    world: World = field(kw_only=True)
    watch: Watch = field(kw_only=True)
    num_passes: int = 0
    _ready_ns: int = 0
    _num_waits: int = 0

    def admit(self, request: Request, stop: StopChecker) -> TargetSequence:
        self.watch.begin(self.client.next_sequence_id, request.prompt, request.max_length)
        return super().admit(request, stop)

    def _decide(self, working: Sequence[TargetSequence]) -> None:
        self._ready_ns, self._num_waits = self.world.now_ns - self.client.delayed_ns, 0
        super()._decide(working)

    def _commit(
        self, working: Sequence[TargetSequence], outputs: Sequence[ModelOutput]
    ) -> dict[TargetSequence, PassOutcome]:
        for sequence in working:
            self.watch.scored(sequence.session, sequence.block)
            self.world.counts["alternative scored"] += len(sequence.block.alternatives)
        self.world.counts[f"pass over {len(working)}"] += 1
        return super()._commit(working, outputs)

    def _wait(self, waits: dict[TargetSequence, Wait]) -> None:
        super()._wait(waits)
        self._num_waits += 1
        self.watch.waited(self.world.now_ns - self.client.delayed_ns - self._ready_ns, self._num_waits)

    def _count(self, outcomes: dict[TargetSequence, PassOutcome], times: PassTimes) -> None:
        metrics = [sequence.metrics for sequence in outcomes]
        before = [(own.num_accepted, own.num_accepted_alternatives) for own in metrics]
        super()._count(outcomes, times)
        self.num_passes += 1
        for sequence, (num_accepted, num_alternatives) in zip(outcomes, before, strict=True):
            session, own = sequence.session, sequence.metrics
            self.watch.committed(session)
            self.world.counts["rest"] += not sequence.decision.sends_verdict
            self.world.counts["alternative accepted"] += own.num_accepted_alternatives - num_alternatives
            accepted = own.num_accepted - num_accepted
            self.world.note(
                f"pass {session.sequence_id} {len(sequence.block.candidates)} {accepted} {session.committed_length}"
            )
