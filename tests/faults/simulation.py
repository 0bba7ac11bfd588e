"""One run: a seed chooses the schedule, the faults and the pair; both real workers do the rest.

python -m tests.faults SEED        run it again, and print its log
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from faults.draft import HANDSHAKE_SECONDS, Drafts
from faults.link import Wires
from faults.models import VOCAB_SIZE, HashModel, text_of
from faults.target import WatchedClient, WatchedTarget
from faults.watch import Violation, Watch
from faults.weather import Weather
from faults.world import World

from amusd.policies.base import Policy
from amusd.policies.schedules import AutoPolicy, ContinuousPolicy, SynchronousPolicy, WindowedPolicy
from amusd.runtime.connection import Connection
from amusd.runtime.target_sequence import TargetSequence
from amusd.runtime.verifier import Request
from amusd.sampling.stopping import StopChecker
from amusd.tracing.recorder import Recorder

MAX_PASSES_TO_ACCEPT = 250
"""After the last fault, before a candidate is accepted again. In passes of the target alone: nothing waits for it."""
MORE_TOKENS = 30

MAX_NUM_SEQS = 4


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    policy: Policy
    num_tokens: int
    cancelled_after: int | None = None
    """Number of tokens; None: never."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    calm_after: int | None
    bare: bool
    """Without prefix hash and nonce: epochs, numbers and incarnations alone keep old messages from new ones."""
    max_num_seqs: int
    arrival: float
    """Probability that the next request comes before a step, while others are at work."""
    requests: tuple[Asked, ...]
    quality: float
    silence: float
    pass_ms: float


def scenario_of(seed: int) -> Scenario:
    """With an odd seed the faults end, and the first answer is long enough to show the time after them."""
    draw, live = random.Random(f"scenario {seed}"), seed % 2 == 1
    max_num_seqs = draw.randint(1, MAX_NUM_SEQS)
    requests = [_asked(draw, live=live) for _ in range(max_num_seqs + draw.randint(0, 3))]
    if live:
        requests[0] = replace(requests[0], num_tokens=700, cancelled_after=None)
    return Scenario(
        calm_after=draw.randint(3, 40) if live else None,
        bare=draw.random() < 0.5,
        max_num_seqs=max_num_seqs,
        arrival=draw.choice((0.02, 0.2, 1.0)),
        requests=tuple(requests),
        quality=draw.choice((0.6, 0.8, 0.95, 1.0) if live else (0.0, 0.5, 0.8, 0.95, 1.0)),
        silence=draw.choice((0.0, 0.1)),
        pass_ms=draw.choice((10.0, 20.0, 40.0, 100.0)),
    )


def _asked(draw: random.Random, *, live: bool) -> Asked:
    prompt = tuple(draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 6)))
    num_tokens = 700 if live and draw.random() < 0.5 else draw.randint(1, 80)
    cancelled_after = draw.randint(0, num_tokens) if draw.random() < 0.3 else None
    return Asked(prompt, _policy(draw), num_tokens, cancelled_after)


def _policy(draw: random.Random) -> Policy:
    lookahead = draw.randint(2, 10)
    waits = {"max_lookahead": lookahead, "min_candidates": draw.randint(0, 3), "max_wait_passes": 1.0}
    block = {"tokens_per_message": max(1, lookahead // 2), "timeout_seconds": 0.2}
    kind = draw.choice(("chain", "branching", "auto", "auto", "windowed", "synchronous"))
    if kind == "chain":
        return ContinuousPolicy(tokens_per_message=draw.randint(1, 5), **waits)
    if kind == "branching":
        tree = {"fan_out": draw.randint(1, 3), "rows_per_step": draw.randint(1, 4)}
        return ContinuousPolicy(always_waits=True, **tree, **waits)
    if kind == "auto":
        tree = draw.choice(({}, {"fan_out": 3, "rows_per_step": 4, "breadth": 3}))
        return AutoPolicy(max_lookahead=lookahead, max_wait_passes=1.0, **tree)
    if kind == "windowed":
        return WindowedPolicy(max_lookahead=2 * block["tokens_per_message"], **block)
    return SynchronousPolicy(max_lookahead=block["tokens_per_message"], **block)


@dataclass(frozen=True)
class Report:
    violation: str | None
    log: str
    counts: Counter[str]
    passes_to_accept: int | None
    """Passes after the last fault; None if faults did not end or the target had given up on drafts."""


@dataclass(eq=False)
class Answer:
    asked: Asked
    sequence: TargetSequence
    watched_from: int
    """Number of the pass from which its candidates are counted: its own first, or the first after the last fault."""
    num_accepted_before: int = 0
    is_live: bool = False
    committed: list[int] = field(default_factory=list)


class Simulation:
    def __init__(self, seed: int) -> None:
        self.scenario = scenario_of(seed)
        self.world = World(seed)
        self.weather = Weather(self.world)
        self.watch = Watch()
        self.wires = Wires(self.world, self.weather, any_session=self.scenario.bare)
        of_drafts = self.scenario.max_num_seqs, self.scenario.quality, self.scenario.silence, self._target_passes
        self.drafts = Drafts(self.world, self.weather, self.wires, self.watch, *of_drafts)
        self._traffic = random.Random(f"traffic {seed}")
        self._is_calm = False
        self._passes_to_accept: int | None = None

    def run(self) -> Report:
        violation = None
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - whatever goes wrong, the seed is to be reported
            violation = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
            while isinstance(error.__context__, Violation):  # what came first counts
                error = error.__context__
                violation = str(error)
            self.world.note(f"violation {violation}")
        return Report(
            violation=violation, log=self.world.log, counts=self.world.counts, passes_to_accept=self._passes_to_accept
        )

    def _run(self) -> None:
        world, scenario = self.world, self.scenario
        world.note(f"{scenario}")
        world.counts.update(asked.policy.name for asked in scenario.requests)
        worker = self._start()
        self.weather.break_out()
        waiting, answers = deque(scenario.requests), list[Answer]()
        while waiting or answers:
            while waiting and worker.has_room and (not answers or self._traffic.random() < scenario.arrival):
                answers.append(self._admit(worker, waiting.popleft()))
            worker.step()
            self._calm_down(worker, answers)
            for answer in answers:
                self._read(worker, answer)
            answers = [answer for answer in answers if not answer.sequence.is_over]
        connection = worker.client.connection
        world.counts["restart"] += connection.num_restarts
        world.counts["lost"] += len(connection.losses)
        if scenario.calm_after is not None and self._passes_to_accept is None and connection.failure is None:
            raise Violation("liveness: no candidate was accepted after the last fault")

    def _start(self) -> WatchedTarget:
        source = self.drafts
        connection = Connection(source=source, startup_timeout_seconds=HANDSHAKE_SECONDS, clock=self.world.clock)
        connection.await_first("")
        recorder = Recorder("target", clock=self.world.clock)
        client = WatchedClient(
            recorder=recorder,
            connection=connection,
            world=self.world,
            weather=self.weather,
            watch=self.watch,
            is_bare=self.scenario.bare,
        )
        model: Any = HashModel(800, self._spend)
        number = self.scenario.max_num_seqs
        return WatchedTarget(model, recorder, client, number, world=self.world, watch=self.watch)

    def _admit(self, worker: WatchedTarget, asked: Asked) -> Answer:
        request = Request(
            prompt=asked.prompt, max_length=len(asked.prompt) + asked.num_tokens, policy=asked.policy, drafter="test"
        )
        stop = StopChecker((), (), asked.num_tokens, str)
        return Answer(asked, worker.admit(request, stop), worker.num_passes)

    def _read(self, worker: WatchedTarget, answer: Answer) -> None:
        """Take in what the last step has brought; end the answer where its time has come."""
        asked, sequence = answer.asked, answer.sequence
        answer.committed += (token.token_id for token in sequence.tokens[len(answer.committed) :])
        number = len(answer.committed)
        if sequence.is_over:
            self._check_end(answer)
        elif asked.cancelled_after is not None and number >= asked.cancelled_after:
            self.world.happened("cancelled" if sequence.is_prefilled else "cancelled in its prompt")
            worker.end(sequence)
            self._check_end(answer)
        elif self._is_live_again(worker, answer):
            sequence.stop.max_new_tokens = min(asked.num_tokens, number + MORE_TOKENS)

    def _check_end(self, answer: Answer) -> None:
        asked, sequence = answer.asked, answer.sequence
        committed = (*asked.prompt, *answer.committed)
        is_whole = sequence.ended_by == "length"
        length = len(asked.prompt) + answer.sequence.stop.max_new_tokens if is_whole else len(committed)
        is_cancelled = sequence.ended_by == "aborted" and asked.cancelled_after is not None
        if committed != text_of(asked.prompt, length)[:length] or not (is_whole or is_cancelled):
            raise Violation(f"the answer is not the target's, or ends by {sequence.ended_by}")
        self.world.counts["stale candidate"] += sequence.metrics.num_stale_candidates

    def _calm_down(self, worker: WatchedTarget, answers: Sequence[Answer]) -> None:
        calm_after = self.scenario.calm_after
        if calm_after is None or self._is_calm or worker.num_passes < calm_after:
            return
        self.weather.calm()
        self._is_calm = True
        for answer in answers:
            answer.watched_from = worker.num_passes
            answer.num_accepted_before = answer.sequence.metrics.num_accepted

    def _is_live_again(self, worker: WatchedTarget, answer: Answer) -> bool:
        """True if this answer has just had its first candidate accepted after the last fault."""
        if not self._is_calm or answer.is_live:
            return False
        num_passes = worker.num_passes - answer.watched_from
        if answer.sequence.metrics.num_accepted > answer.num_accepted_before:
            answer.is_live = True
            self._passes_to_accept = max(num_passes, self._passes_to_accept or 0)
        elif num_passes > MAX_PASSES_TO_ACCEPT and worker.client.connection.failure is None:
            raise Violation(f"liveness: no candidate was accepted within {num_passes} passes after the last fault")
        return answer.is_live

    def _target_passes(self, deadline_ns: int) -> bool:
        left_ns = deadline_ns - self.world.target.ns
        if left_ns <= 0:
            self.world.advance(0)  # what is due by now
            end = self.wires.to_target.end
            return end is not None and end.has_mail
        self.world.next_event_within(self.world.now_ns + left_ns)
        return True

    def _spend(self, action: str) -> None:
        self.world.advance(self.world.between(0.7, 1.3) * int(self.scenario.pass_ms))


def run(seed: int) -> Report:
    return Simulation(seed).run()
