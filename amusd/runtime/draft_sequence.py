"""One sequence of the draft, with its counts and events."""

from __future__ import annotations

from dataclasses import dataclass, field

from amusd.policies.estimates import VerdictClock
from amusd.protocol.messages import Candidate, Progress, Verdict
from amusd.runtime.rollback import RollbackManager
from amusd.tracing.events import EventName
from amusd.tracing.recorder import Recorder


@dataclass(slots=True)
class DraftSequence:
    """One sequence at the draft. Each step is recorded as an event."""

    manager: RollbackManager
    drafter_name: str
    recorder: Recorder
    opened_ns: int
    verdict: Verdict | None = None
    """Newest verdict, not applied yet; replaces earlier ones."""
    busy_ns: int = 0
    num_drafted: int = 0
    num_rollbacks: int = 0
    verdict_clock: VerdictClock = field(default_factory=VerdictClock)
    step_ns: int = 0
    """Duration of the last step."""

    @property
    def sequence_id(self) -> int:
        """Number in messages and events."""
        return self.manager.session.sequence_id

    @property
    def patience_seconds(self) -> float:
        """Seconds to wait for a verdict that is due before the next step would end."""
        if not self.manager.can_wait:
            return 0.0
        return self.verdict_clock.patience_ns(self.recorder.now_ns()) / 1e9

    def roll_back(self) -> bool:
        """Apply the newest verdict; return whether it changed anything.

        Raises `PeerProtocolError` and `AssertionError` as `RollbackManager.apply`.
        """
        verdict, self.verdict = self.verdict, None
        if verdict is None:
            return False
        start_ns = self.recorder.now_ns()
        transition = self.manager.apply(verdict)
        if transition is None:
            return False
        self.num_rollbacks += transition.num_discarded > 0
        self.verdict_clock.on_verdict(start_ns, goes_on=self.manager.can_wait)
        self.account(
            "rollback" if transition.num_discarded else "advance",
            start_ns,
            num_discarded=transition.num_discarded,
            num_adopted=len(transition.token_ids),
            committed_length=self.manager.session.base,
            kept_steps=None if self.manager.session.tree.is_chain else [node.step for node in transition.kept],
        )
        return True

    def on_step(self, num_tokens: int, step_ns: int, start_ns: int, end_ns: int) -> None:
        """Count a step of `step_ns`; this sequence's share is `start_ns` to `end_ns`.

        `num_tokens`: computed nodes of a tree, or tokens added to a chain.
        """
        self.num_drafted += num_tokens
        self.step_ns = step_ns
        self.verdict_clock.on_step(step_ns)
        self.account("draft_step", start_ns, end_ns, num_tokens=num_tokens, length=self.manager.length)

    def offer(self) -> Candidate | None:
        """The next message of candidates; None while there are too few."""
        candidate = self.manager.session.offer(self.step_ns)
        if candidate is not None and candidate.token_ids:
            self.verdict_clock.on_candidates(self.recorder.now_ns())
        return candidate

    def progress(self) -> Progress:
        """The counts so far."""
        return Progress(
            sequence_id=self.sequence_id,
            num_drafted=self.num_drafted + self.manager.num_looked_up,
            num_rollbacks=self.num_rollbacks,
            busy_ns=self.busy_ns,
            open_ns=self.recorder.now_ns() - self.opened_ns,
        )

    def close(self) -> None:
        """Release the drafter."""
        end_ns = self.recorder.now_ns()
        self.recorder.span("sequence", self.opened_ns, end_ns, self.sequence_id, drafter=self.drafter_name)
        self.manager.close()

    def account(self, name: EventName, start_ns: int, end_ns: int | None = None, /, **fields: object) -> None:
        """Count and record work that ends at `end_ns`, or now."""
        end_ns = self.recorder.now_ns() if end_ns is None else end_ns
        self.busy_ns += end_ns - start_ns
        self.recorder.span(name, start_ns, end_ns, self.sequence_id, **fields)
