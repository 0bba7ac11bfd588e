"""Draft processes: the real handshake and the real worker, one action at a time, which may be the last one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from faults.link import End, Wires
from faults.models import Ghost, HashDrafter
from faults.watch import Violation, Watch
from faults.weather import Weather
from faults.world import MS, World

from amusd.child import Ended
from amusd.errors import PeerLostError
from amusd.protocol.messages import Candidate, Close, DraftHello, Message, Open, TargetHello
from amusd.runtime.draft_sequence import DraftSequence
from amusd.runtime.draft_worker import DraftWorker
from amusd.runtime.hello import failure_report
from amusd.runtime.rollback import RollbackManager
from amusd.tracing.recorder import Recorder

HANDSHAKE_SECONDS = 1.0
STEP_MS = {"prefill": (4, 12), "step": (1, 6), "follow": (0.01, 0.1)}
SLOWNESS = 25


class DrafterFails(Exception):  # noqa: N818 - an event
    """The drafter fails in one of its actions."""


class Killed(BaseException):
    """The process ends here and now; nothing of it runs any more, not even its error handling."""


class WatchedManager(RollbackManager):
    world: World

    def _reopen(self) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, DrafterFails):
            raise Violation(f"agreement: the drafter did not follow: {error!r}")
        super()._reopen()
        self.world.counts["drafter opened again"] += 1


@dataclass
class WatchedDraft(DraftWorker):
    process: DraftProcess = field(kw_only=True)
    _ghosts: frozenset[Ghost] = frozenset()

    def step(self) -> None:
        super().step()
        for sequence in self._sequences.values():
            self.process.watch.draft_stepped(self.process.incarnation, sequence.manager.session)

    def _end_others(self, message: Open | Close) -> None:
        before = set(self._sequences)
        super()._end_others(message)
        self.process.world.counts["end of a sequence lost"] += len(before - set(self._sequences))

    def _open(self, opening: Open) -> None:
        super()._open(opening)
        for sequence in self._sequences.values():
            manager: Any = sequence.manager
            manager.__class__, manager.world = WatchedManager, self.process.world

    def _handle(self, message: Message) -> None:
        number, before = getattr(message, "sequence_id", -1), set(self._sequences)
        super()._handle(message)
        if before - set(self._sequences) - self.process.watch.over:
            raise Violation(f"isolation: what came for sequence {number} has ended one that is open")

    def _roll_back(self, sequence: DraftSequence) -> bool:
        before, has_verdict = sequence.num_rollbacks, sequence.verdict is not None
        has_advanced = super()._roll_back(sequence)
        counts, session = self.process.world.counts, sequence.manager.session
        counts["rollback"] += sequence.num_rollbacks - before
        counts["stale verdict"] += has_verdict and not has_advanced
        has_tree = bool(session.tree.root.children) and not session.tree.is_chain
        counts["adoption"] += has_advanced and has_tree and sequence.num_rollbacks == before
        return has_advanced

    def _send(self, sequence: DraftSequence) -> None:
        manager: Any = sequence.manager
        self._ghosts = manager.drafter.ghosts(manager.session.tree.root, manager.session.tree.unsent)
        super()._send(sequence)

    def _post(self, message: Message) -> None:
        if isinstance(message, Candidate):
            self.process.watch.ghosts[message] = self._ghosts
        self.process.may_end()
        self.process.may_be_cut_off()
        super()._post(message)
        self.process.may_end()


class DraftProcess:
    def __init__(self, drafts: Drafts, nonce: int) -> None:
        self.drafts = drafts
        self.world = drafts.world
        self.watch = drafts.watch
        self.incarnation = 0
        self._nonce = nonce
        self.ended = False
        self._waking = False
        self._busy_until_ns = 0
        self._end: End | None = None
        self._worker: WatchedDraft | None = None
        self._wake_in(self.world.between(1, self.world.random.choice((2, 40))))

    def kill(self) -> None:
        self._ended("killed")

    def may_end(self) -> None:
        weather = self.drafts.weather
        if weather.hits("crash"):
            raise Killed
        if weather.hits("fail"):
            raise DrafterFails("amid an action")

    def may_be_cut_off(self) -> None:
        if self.drafts.weather.hits("cut"):
            raise PeerLostError("the link is cut")

    def spend(self, action: str) -> None:
        slow = self.world.now_ns < self.drafts.weather.slow_until_ns
        low_ms, high_ms = STEP_MS[action]
        self.world.draft.ahead_ns += self.world.between(low_ms, high_ms) * (SLOWNESS if slow else 1)
        self.may_end()

    # The loop, one action at a time

    def _wake_in(self, delay_ns: int) -> None:
        if not (self._waking or self.ended):
            self._waking = True
            self.world.plan(max(delay_ns, self._busy_until_ns - self.world.now_ns), self._wake)

    def _wake(self) -> None:
        self._waking = False
        if self.ended:
            return
        if self.world.now_ns < self.drafts.weather.draft_stopped_until_ns:
            self._wake_in(10 * MS)
            return
        self.world.acting, self.world.draft.ahead_ns = self.world.draft, 0
        try:
            self._act()
        except Killed:
            self._ended("crashed")
        except PeerLostError as error:
            self._ended(f"left: {error}")
        except Exception as error:  # noqa: BLE001 - a process that fails says why
            self._failed(error)
        finally:
            self._busy_until_ns = self.world.now_ns + self.world.draft.ahead_ns
            self.world.acting = self.world.target
            self.world.draft.ahead_ns = 0

    def _act(self) -> None:
        self.may_end()
        self.may_be_cut_off()
        if self._worker is not None:
            self._worker.step()
            if not self._worker._running:
                self._ended("shut down")
            elif self._worker.working or self._end.has_mail:
                self._wake_in(MS // 100)
            return
        if self._end is None:
            self._end = self.drafts.wires.draft_end(self._nonce, self._passes)
            self._end.on_arrival = lambda: self._wake_in(0)
        if isinstance(hello := self._end.receive(0.0), TargetHello):
            self.incarnation = hello.incarnation
            self._worker = self._new_worker(self._end)
            self._end.send(DraftHello(hello.incarnation, "", ("test",), (), 7))
        self._wake_in(20 * MS)

    def _new_worker(self, link: End) -> WatchedDraft:
        quality, silence = self.drafts.quality, self.drafts.silence
        number = max(self.drafts.max_num_seqs, 1 + self.incarnation % 2)
        drafters = [HashDrafter(self.spend, quality, silence, self.incarnation) for _ in range(number)]
        return WatchedDraft(
            link=link,
            drafters={"test": drafters},
            incarnation=self.incarnation,
            recorder=Recorder("draft", clock=self.world.clock),
            process=self,
        )

    def _passes(self, deadline_ns: int) -> bool:
        """A draft that has work sleeps for the whole wait; an idle one is woken by the next message."""
        if self._worker is not None and self._worker.working:
            self.world.draft.ahead_ns += max(0, deadline_ns - self.world.draft.ns)
        return False

    def _failed(self, error: BaseException) -> None:
        is_failing = isinstance(error, DrafterFails) or isinstance(error.__cause__, DrafterFails)
        if isinstance(error, Violation) or not is_failing:
            raise error
        if self._end is not None:
            self.world.note(f"failure {error!r}")
            with suppress(PeerLostError):
                self._end.send(failure_report(error))
        self._ended("failed")

    def _ended(self, how: str) -> None:
        if self.ended:
            return
        self.ended = True
        self.world.note(f"draft {self.incarnation} {how}")
        if self._end is not None:
            self._end.close()


@dataclass
class Drafts:
    world: World
    weather: Weather
    wires: Wires
    watch: Watch
    max_num_seqs: int
    quality: float
    silence: float
    passes: Callable[[int], bool]
    """True if the target sleeps until this time or the next message."""
    process = is_here = can_repeat = True
    _process: DraftProcess | None = None

    def start(self) -> bool:
        if self._process is not None and not self._process.ended:
            return False
        self._process = None
        return True

    def connect(self) -> End:
        """Connect to a new process, which runs at once."""
        nonce = self.world.random.getrandbits(64)
        self._process = DraftProcess(self, nonce)
        return self.wires.target_end(nonce, self.passes)

    def ended(self, _timeout: float, /) -> Ended | None:
        return Ended(0, -9) if self._process is not None and self._process.ended else None

    def drop(self) -> None:
        if self._process is not None:
            self.world.plan(self.world.between(0.1, 30), self._process.kill)

    def stop(self) -> None:
        pass
