"""Events and counts of a simulated worker: the names and figures of the real ones, at virtual times."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amusd.protocol.messages import Message
from amusd.protocol.verification import PassOutcome
from amusd.simulation.clock import VirtualClock
from amusd.tracing.messages import record_message
from amusd.tracing.metrics import DraftCounts, GenerationMetrics
from amusd.tracing.recorder import NO_SEQUENCE, Recorder
from amusd.types import Role


class Journal(Recorder):
    """The recorder of one simulated worker: on the virtual clock, and forgetful where nobody wants the events."""

    def __init__(self, role: Role, clock: VirtualClock, *, keep: bool, path: Path | None = None) -> None:
        self._clock = clock
        self._keep = False  # what the recorder itself says of this process is not part of a simulation
        super().__init__(role.value, path)
        self._keep = keep
        self.instant("worker", NO_SEQUENCE, host="simulated", pid=0)

    def span(self, name: str, start_ns: int, end_ns: int, sequence_id: int, **fields: Any) -> None:
        """Record something that took time."""
        if self._keep:
            super().span(name, start_ns, end_ns, sequence_id, **fields)

    def mark(self, name: str, sequence_id: int, fields: dict[str, Any]) -> None:
        """Record something that happened now."""
        self.span(name, self._clock.now_ns, self._clock.now_ns, sequence_id, **fields)

    def message(self, name: str, message: Message, reception: str | None = None) -> None:
        """Record that a message is sent, or has been received and what became of it."""
        if self._keep:
            record_message(self, name, message, reception)


@dataclass
class TargetCounts:
    """What the target counts about one answer."""

    start_ns: int
    num_prompt_tokens: int
    first_ns: int = 0
    last_ns: int = 0
    prefill_ns: int = 0
    pass_ns: int = 0
    wait_ns: int = 0
    host_ns: int = 0
    """Up to the last token."""
    num_tokens: int = 0
    num_passes: int = 0
    num_drafts: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    num_late_accepted: int = 0
    num_alternatives: int = 0
    num_rescued: int = 0
    num_stale_candidates: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    acceptance: Counter[tuple[int, int]] = field(default_factory=Counter)
    chunk_gaps_ns: list[int] = field(default_factory=list)
    draft: DraftCounts | None = None

    def passed(self, now_ns: int, pass_ns: int, outcome: PassOutcome) -> None:
        """As `Tally.passed`."""
        if self.num_passes:
            self.chunk_gaps_ns.append(now_ns - self.last_ns)
        else:
            self.first_ns = now_ns
        self.last_ns = now_ns
        self.pass_ns += pass_ns
        self.num_passes += 1
        self.num_tokens += outcome.num_tokens
        self.num_verified += outcome.num_judged
        self.num_drafts += outcome.num_judged > 0
        self.num_accepted += outcome.num_accepted
        self.num_late_accepted += outcome.num_late_accepted
        self.num_alternatives += outcome.num_alternatives
        self.num_rescued += outcome.num_rescued
        if outcome.num_judged:
            self.acceptance[outcome.num_judged, outcome.num_accepted] += 1
        self.accepted_by_position.extend([0] * (outcome.num_accepted - len(self.accepted_by_position)))
        for position in range(outcome.num_accepted):
            self.accepted_by_position[position] += 1

    def metrics(self) -> GenerationMetrics:
        """The same figures as of a measured answer."""
        return GenerationMetrics(
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=self.num_tokens,
            first_token_ns=self.first_ns - self.start_ns,
            total_ns=self.last_ns - self.start_ns,
            prefill_ns=self.prefill_ns,
            pass_ns=self.pass_ns,
            wait_ns=self.wait_ns,
            num_passes=self.num_passes,
            num_drafts=self.num_drafts,
            num_verified=self.num_verified,
            num_accepted=self.num_accepted,
            num_late_accepted=self.num_late_accepted,
            num_alternatives=self.num_alternatives,
            num_rescued=self.num_rescued,
            accepted_by_position=tuple(self.accepted_by_position),
            acceptance=dict(self.acceptance),
            chunk_gaps_ns=tuple(self.chunk_gaps_ns),
            num_stale_candidates=self.num_stale_candidates,
            draft=self.draft,
        )
