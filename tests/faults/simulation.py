"""One run: a seed chooses the schedule, the faults and the pair; both real workers do the rest.

python -m tests.faults SEED        run it again, and print its log
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faults.draft import HANDSHAKE_SECONDS, Drafts
from faults.link import End, Wires
from faults.models import VOCAB_SIZE, HashModel, text_of
from faults.resting import Resting
from faults.target import WatchedClient, WatchedTarget
from faults.watch import Violation, Watch
from faults.weather import Weather
from faults.world import World
from protocol.mutants import Unhashed
from runtime.pair import decode

from amusd.policies.auto import AutoPolicy
from amusd.policies.base import Policy
from amusd.policies.fixed import BranchingPolicy, ChainPolicy, SynchronousPolicy, WindowedPolicy
from amusd.protocol.messages import PROTOCOL_VERSION, Hello
from amusd.protocol.target_session import TargetSession
from amusd.runtime.draft_restart import FIRST_INCARNATION, DraftRestart
from amusd.runtime.handshake import await_hello
from amusd.runtime.target_sequence import Request
from amusd.sampling.stopping import StopChecker
from amusd.tracing.recorder import Recorder
from amusd.transport.base import Rendezvous
from amusd.types import FinishReason, Role

MAX_PASSES_TO_ACCEPT = 250
"""After the last fault, before a candidate is accepted again. In passes of the target alone: nothing waits for it."""
MORE_TOKENS = 30
"""What is left of an answer then."""

UNHASHED = {TargetSession: Unhashed}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What a seed chooses besides the weather."""

    calm_after: int | None
    """Liveness mode: passes after which nothing goes wrong any more. None: faults for ever."""
    bare: bool
    """Prefix hash and nonce are switched off: epochs, numbers and incarnations alone keep lives and chains apart."""
    policy: Policy
    prompts: tuple[tuple[int, ...], ...]
    num_tokens: int
    quality: float
    silence: float
    pass_ms: float


def scenario_of(seed: int) -> Scenario:
    """The same for the same seed."""
    draw = random.Random(f"scenario {seed}")
    live = seed % 2 == 1
    lookahead = draw.randint(2, 10)
    block = max(1, lookahead // 2)
    policies: tuple[Policy, ...] = (
        *(
            ChainPolicy(
                max_lookahead=lookahead,
                tokens_per_message=draw.randint(1, 5),
                min_candidates=draw.randint(0, 3),
                max_wait_passes=1.0,
            )
            for _ in range(2)
        ),
        WindowedPolicy(max_lookahead=2 * block, tokens_per_message=block, timeout_seconds=0.2),
        SynchronousPolicy(max_lookahead=block, tokens_per_message=block, timeout_seconds=0.2),
        *(
            BranchingPolicy(
                max_lookahead=lookahead,
                fan_out=draw.randint(1, 3),
                rows_per_step=draw.randint(1, 4),
                min_candidates=draw.randint(0, 3),
                max_wait_passes=1.0,
            )
            for _ in range(2)
        ),
        AutoPolicy(max_lookahead=lookahead, fan_out=1, rows_per_step=1, max_wait_passes=1.0),
        AutoPolicy(max_lookahead=lookahead, fan_out=3, rows_per_step=4, max_wait_passes=1.0, breadth=3),
    )
    prompts = tuple(
        tuple(draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 6))) for _ in range(1 if live else 2)
    )
    return Scenario(
        calm_after=draw.randint(3, 40) if live else None,
        bare=draw.random() < 0.5,
        policy=_resting(seed, draw.choice(policies)),
        prompts=prompts,
        num_tokens=700 if live else draw.randint(1, 80),
        quality=draw.choice((0.6, 0.8, 0.95, 1.0) if live else (0.0, 0.5, 0.8, 0.95, 1.0)),
        silence=draw.choice((0.0, 0.1)),
        pass_ms=draw.choice((10.0, 20.0, 40.0, 100.0)),
    )


def _resting(seed: int, policy: Policy) -> Policy:
    """Now and then it has the draft rest."""
    draw = random.Random(f"rests {seed}")
    return Resting(policy, draw.randint(1, 12)) if draw.random() < 0.15 else policy


@dataclass(frozen=True)
class Report:
    """How a run ended."""

    seed: int
    violation: str | None
    digest: str
    """Of the log."""
    log: str
    counts: Counter[str]
    is_live: bool
    """Its faults ended."""
    passes_to_accept: int | None
    """After that; None where the target had given up on drafts."""


class Simulation:
    """One seed."""

    def __init__(
        self,
        seed: int,
        defects: Mapping[type, Any] | None = None,
        worker: type[WatchedTarget] = WatchedTarget,
        client: type[WatchedClient] = WatchedClient,
        num_tokens_beyond: int = 0,
    ) -> None:
        """`defects`: real session class -> the one to put in its place; without the last lines of defence then.

        `num_tokens_beyond`: so much later than it should does the stop checker end the answer.
        """
        self.seed = seed
        self.scenario = scenario_of(seed)
        self.world = World(seed)
        self.weather = Weather(self.world)
        self.watch = Watch()
        bare = self.scenario.bare or defects is not None
        self.defects = {**(UNHASHED if bare else {}), **(defects or {})}
        self.wires = Wires(self.world, self.weather, any_session=bare)
        self.drafts = Drafts(
            self.world,
            self.weather,
            self.wires,
            self.watch,
            quality=self.scenario.quality,
            silence=self.scenario.silence,
            defects=self.defects,
        )
        self._worker_class, self._client_class = worker, client
        self._num_tokens_beyond = num_tokens_beyond
        self._calm_at: int | None = None
        self._accepted_before_calm = 0
        self._passes_to_accept: int | None = None

    def run(self) -> Report:
        """To the end of its last answer, or to the first violation."""
        violation = None
        with self.world.time(self.world.random.getrandbits):
            try:
                self._run()
            except Exception as error:  # noqa: BLE001 - whatever goes wrong, the seed is to be reported
                violation = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
                while isinstance(error.__context__, Violation):  # what came first counts
                    error = error.__context__
                    violation = str(error)
                self.world.note(f"violation {violation}")
        return Report(
            seed=self.seed,
            violation=violation,
            digest=self.world.digest,
            log=self.world.log,
            counts=self.world.counts,
            is_live=self.scenario.calm_after is not None,
            passes_to_accept=self._passes_to_accept,
        )

    def _run(self) -> None:
        world, scenario = self.world, self.scenario
        world.note(f"{scenario}")
        world.counts[type(scenario.policy).__name__] += 1
        worker = self._start()
        self.weather.break_out()
        for prompt in scenario.prompts:
            self._decode(worker, prompt)
        world.counts["restart"] += worker.client.num_restarts
        world.counts["lost"] += len(worker.client.losses)
        world.counts["given up"] += worker.client.failure is not None
        if scenario.calm_after is not None and self._passes_to_accept is None and worker.client.failure is None:
            raise Violation("liveness: no candidate was accepted after the last fault")

    def _start(self) -> WatchedTarget:
        """Both processes meet, with nothing in their way."""
        own = Hello(PROTOCOL_VERSION, Role.TARGET, 0, VOCAB_SIZE, "", ())
        nonce = self.world.random.getrandbits(64)
        link = self._listen(nonce)
        self.drafts.tell(FIRST_INCARNATION, Rendezvous(link.address, nonce))
        peer = await_hello(link, own, HANDSHAKE_SECONDS)
        recorder = Recorder("target", now_ns=self.world.time_ns)
        client = self._client_class(
            recorder=recorder,
            vocab_size=VOCAB_SIZE,
            link=link,
            peer=peer,
            draft_restart=DraftRestart(self.drafts, self._listen, own, HANDSHAKE_SECONDS),
            world=self.world,
            weather=self.weather,
            watch=self.watch,
        )
        model = HashModel(800, self._spend)
        return self._worker_class(model, recorder, client, world=self.world, watch=self.watch, defects=self.defects)

    def _decode(self, worker: WatchedTarget, prompt: tuple[int, ...]) -> None:
        scenario = self.scenario
        max_length = len(prompt) + scenario.num_tokens
        text = text_of(prompt, max_length + self._num_tokens_beyond)
        self.watch.begin(text, max_length)
        request = Request(prompt=prompt, max_length=max_length, policy=scenario.policy, drafter="test")
        stop = StopChecker((), (), scenario.num_tokens + self._num_tokens_beyond, str)
        answer, committed = decode(worker, request, stop), list(prompt)
        while True:
            try:
                committed += next(answer).token_ids
            except StopIteration as end:
                outcome = end.value
                break
            if self._is_live_again(worker):
                stop.max_new_tokens = min(scenario.num_tokens, len(committed) - len(prompt) + MORE_TOKENS)
        if (
            tuple(committed) != text[: len(prompt) + stop.max_new_tokens]
            or outcome.finish_reason is not FinishReason.LENGTH
        ):
            raise Violation(f"the answer is not the target's, or ends by {outcome.finish_reason}")
        self.world.counts["stale candidate"] += outcome.metrics.num_stale_candidates

    def _is_live_again(self, worker: WatchedTarget) -> bool:
        """After a pass in liveness mode: whether a candidate was accepted for the first time after the last fault."""
        if self.scenario.calm_after is None or self._passes_to_accept is not None:
            return False
        if self._calm_at is None:
            if worker.num_passes >= self.scenario.calm_after:
                self.weather.calm()
                self._calm_at, self._accepted_before_calm = worker.num_passes, worker.num_accepted
            return False
        num_passes = worker.num_passes - self._calm_at
        if worker.num_accepted > self._accepted_before_calm:
            self._passes_to_accept = num_passes
        elif num_passes > MAX_PASSES_TO_ACCEPT and worker.client.failure is None:
            raise Violation(f"liveness: no candidate was accepted within {num_passes} passes after the last fault")
        return self._passes_to_accept is not None

    def _listen(self, nonce: int) -> End:
        return self.wires.target_end(nonce, self._target_passes)

    def _target_passes(self, deadline_ns: int) -> bool:
        """Let time pass until something happens, or the deadline by the target's clock; False then."""
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
    """The seed with nothing broken in amusd."""
    return Simulation(seed).run()
