"""The draft's loop: receive, roll back, propose, send.

It waits for messages if no sequence has room to run ahead, and for a verdict that is due before a step would end.

A sequence lives from its `Open` to its `Close`, and a number is used once. Both messages list the numbers that are not
over, so a lost `Close` does no harm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypeAlias

from amusd.drafters.base import Drafter, Expansion
from amusd.errors import PeerLostError, PeerProtocolError
from amusd.logs import warn_once
from amusd.policies.estimates import DRAFT_ROW_SHARE, RowCost
from amusd.protocol.draft_tree import Guesses, Node, next_nodes
from amusd.protocol.messages import Close, Features, Message, Open, Refused, Shutdown, Verdict
from amusd.runtime.draft_sequence import DraftSequence
from amusd.runtime.rollback import RollbackManager
from amusd.sampling.acceptance import certain
from amusd.tracing.events import NO_SEQUENCE
from amusd.tracing.recorder import Recorder
from amusd.transport.base import Link

IDLE_SECONDS = 1.0
MAX_SHOWN = 40
"""Most characters of a peer's name in a line for people."""
SIGN_NS = 100_000_000
"""After so many nanoseconds of work without a message, a sign of life is sent; well below `max_silence_seconds`."""

StepShare: TypeAlias = tuple[Sequence[Node], Sequence[Guesses]]
"""One sequence's part in a step: the nodes that were computed, and the guesses after them; both may be empty."""


@dataclass
class DraftWorker:
    """Serves the sequences that the target opens over `link` until shutdown or loss."""

    link: Link
    drafters: Mapping[str, Sequence[Drafter]]
    """Drafters by name, one for each sequence that may be open at a time."""
    incarnation: int
    recorder: Recorder
    _sequences: dict[int, DraftSequence] = field(default_factory=dict)
    _not_over: frozenset[int] = frozenset()
    _free: dict[str, dict[int, Drafter]] = field(init=False)
    """Free drafters, by name and by the number of their last sequence; the least recently used first."""
    _costs: dict[tuple[str, bool], RowCost] = field(default_factory=dict)
    """Times of steps by rows, for each drafter, chains and trees apart."""
    _running: bool = True
    _last_sent_ns: int = 0

    def __post_init__(self) -> None:
        # no sequence has a negative number
        self._free = {name: dict(enumerate(made, -len(made))) for name, made in self.drafters.items()}

    def run(self) -> None:
        """Run until `Shutdown` or the end of the link."""
        try:
            while self._running:
                self.step()
        except PeerLostError:
            # a target may end a run by disconnecting
            self.recorder.instant("target_gone", NO_SEQUENCE)
        finally:
            for sequence in tuple(self._sequences.values()):
                self._forget(sequence)
            self.recorder.flush()

    @property
    def working(self) -> list[DraftSequence]:
        """The sequences that have room to run ahead."""
        return [sequence for sequence in self._sequences.values() if sequence.manager.has_work]

    def step(self) -> None:
        """Receive, roll back, propose, send. Raises `PeerLostError`."""
        self.take_in()
        self.propose()

    def take_in(self) -> None:
        """Receive, waiting if there is no work, and apply each sequence's verdict. Raises `PeerLostError`."""
        self._receive()
        for sequence in self._sequences.values():
            is_news = self._roll_back(sequence)
            sequence.manager.take_features()
            if is_news:
                self._send(sequence)  # at once: the target should hear what was prepared, or that nothing is left

    def propose(self) -> None:
        """Compute one step for sequences with work, and send the result. Raises `PeerLostError`."""
        alike: dict[tuple[str, bool], list[DraftSequence]] = defaultdict(list)
        for sequence in self.working:
            alike[sequence.drafter_name, sequence.manager.session.tree.is_chain].append(sequence)
        for kind, working in alike.items():
            self._compute(working, self._costs.setdefault(kind, RowCost(DRAFT_ROW_SHARE)))
            for sequence in working:
                self._send(sequence)
            if self.recorder.now_ns() - self._last_sent_ns >= SIGN_NS:
                self._post(working[0].progress())

    def _compute(self, sequences: Sequence[DraftSequence], cost: RowCost) -> None:
        """Compute one step for sequences with work, and charge each a share of the time by rows."""
        start_ns = self.recorder.now_ns()
        shares = draft_step([sequence.manager for sequence in sequences], cost.row_share)
        step_ns = self.recorder.now_ns() - start_ns
        nums_done = [*accumulate((len(nodes) for nodes, _ in shares), initial=0)]
        if all(node.parent for nodes, _ in shares for node in nodes):  # not for a root: after a miss caches are cold
            cost.add(nums_done[-1], step_ns)
        times = pairwise(start_ns + step_ns * number // nums_done[-1] for number in nums_done)
        for sequence, (nodes, found), (begin_ns, end_ns) in zip(sequences, shares, times, strict=True):
            if nodes:
                sequence.on_step(len(found), step_ns, begin_ns, end_ns)

    def _receive(self) -> None:
        # one step serves all working sequences, so the shortest patience counts
        patience = min((sequence.patience_seconds for sequence in self.working), default=None)
        message = self._wait() if patience is None else self.link.receive(patience)
        while message is not None:
            self.recorder.message("receive", message)
            self._handle(message)
            message = self.link.receive(0.0) if self._running else None

    def _wait(self) -> Message | None:
        """Wait for a message, because nothing can be drafted before one comes."""
        start_ns = self.recorder.now_ns()
        message = self.link.receive(IDLE_SECONDS)
        for sequence in self._sequences.values():
            self.recorder.span("draft_wait", start_ns, self.recorder.now_ns(), sequence.sequence_id)
        return message

    def _handle(self, message: Message) -> None:
        sequence = self._sequences.get(getattr(message, "sequence_id", NO_SEQUENCE))
        if isinstance(message, Open):
            self._open(message)
        elif isinstance(message, Verdict) and sequence is not None:
            sequence.verdict = message
        elif isinstance(message, Features) and sequence is not None and message.incarnation == self.incarnation:
            sequence.manager.features.append(message)
        elif isinstance(message, Close):
            self._close(message, sequence)
        elif isinstance(message, Shutdown):
            self._running = False

    def _open(self, opening: Open) -> None:
        self._end_others(opening)
        has_begun = opening.sequence_id in self._sequences or self._is_over(opening.sequence_id)
        if opening.incarnation != self.incarnation or has_begun:
            return
        start_ns = self.recorder.now_ns()
        try:
            free = self._free_of(opening.drafter)
            last = opening.follows if opening.follows in free else next(iter(free))
            if last != opening.follows:
                free[last].forget()
            manager = RollbackManager(opening, free[last])
            manager.open()
        except PeerProtocolError as error:  # the target goes on alone
            self._post(Refused(opening.sequence_id))
            warn_once(f"opened no sequence: {error}")  # the target asks again and again
            return
        del free[last]
        sequence = DraftSequence(manager, opening.drafter, self.recorder, start_ns)
        sequence.account("draft_prefill", start_ns, num_tokens=len(opening.token_ids), fan_out=opening.fan_out)
        self._sequences[opening.sequence_id] = sequence
        if not manager.session.tree.has_work:  # beyond the drafter's last position: the target need not wait
            self._send(sequence)

    def _free_of(self, name: str) -> dict[int, Drafter]:
        """The free drafters of `name`. Raises `PeerProtocolError` for an unknown name, or if none is free."""
        if name not in self._free:
            names = ", ".join(self._free) or "none"
            raise PeerProtocolError(f"the target asks for a drafter {name[:MAX_SHOWN]!r}; this draft has: {names}")
        if not self._free[name]:
            raise PeerProtocolError(f"all {len(self.drafters[name])} drafters {name!r} are at work")
        return self._free[name]

    def _roll_back(self, sequence: DraftSequence) -> bool:
        try:
            return sequence.roll_back()
        except PeerProtocolError:
            self._post(Refused(sequence.sequence_id))
            return False

    def _send(self, sequence: DraftSequence) -> None:
        while (candidate := sequence.offer()) is not None:
            self._post(candidate)

    def _close(self, message: Close, sequence: DraftSequence | None) -> None:
        self._end_others(message)
        if sequence is None:
            self._post(Refused(message.sequence_id))
            return
        self._roll_back(sequence)  # a last verdict counts for a sequence that follows
        sequence.manager.take_features()
        progress = sequence.progress()
        self._forget(sequence)
        self.recorder.message("send", progress)
        self.recorder.flush()  # the target may read the events as soon as it has the counts
        self.link.send(progress)

    def _post(self, message: Message) -> None:
        self.recorder.message("send", message)
        self.link.send(message)
        self._last_sent_ns = self.recorder.now_ns()

    def _end_others(self, message: Open | Close) -> None:
        """End all other sequences that are over by the messages so far.

        Numbers increase, and an ended sequence stays ended, so a late message is still true.
        """
        said = frozenset(message.not_over)
        earlier, later = sorted((self._not_over, said), key=lambda numbers: max(numbers, default=0))
        begun = max(earlier, default=0)
        # a number that both cover is open only if both have it
        self._not_over = frozenset(number for number in later if number >= begun or number in earlier)
        for number, sequence in tuple(self._sequences.items()):
            if number != message.sequence_id and self._is_over(number):
                self._forget(sequence)

    def _is_over(self, sequence_id: int) -> bool:
        return sequence_id < max(self._not_over, default=0) and sequence_id not in self._not_over

    def _forget(self, sequence: DraftSequence) -> None:
        del self._sequences[sequence.sequence_id]
        sequence.close()
        self._free[sequence.drafter_name][sequence.sequence_id] = sequence.manager.drafter


def draft_step(managers: Sequence[RollbackManager], row_share: float = 0.0) -> list[StepShare]:
    """Compute the most valuable nodes of sequences whose drafters were made together; return each sequence's share.

    A step that computes a root is urgent, since the target has no candidate: it ends once a message is ready.
    `row_share`: see `next_nodes`.
    """
    chosen = next_nodes([manager.session.tree for manager in managers], row_share)
    working = [(manager, nodes) for manager, nodes in zip(managers, chosen, strict=True) if nodes]
    is_urgent = any(manager.session.tree.root in nodes for manager, nodes in working)
    parts = []
    for manager, nodes in working:
        session, least = manager.session, 1 if is_urgent else manager.drafter.tokens_per_replay
        num_tokens = min(session.tree.room, max(session.opening.tokens_per_message, least))
        parts.append(Expansion(session.tree.root, nodes, num_tokens, session.tree.room))
    drafters = [manager.drafter for manager, _ in working]
    found = drafters[0].step(drafters, parts) if drafters else []
    for (manager, nodes), guesses in zip(working, found, strict=True):
        draft_probs: Sequence[bytes] = ()
        if manager.distribution.rule == "rejection":
            draft_probs = manager.drafter.take_draft_probs() or [certain(after[0][0]) for after in guesses if after]
        manager.session.tree.grow(nodes, guesses, draft_probs)
    shares = iter(found)
    return [(nodes, next(shares) if nodes else ()) for nodes in chosen]
