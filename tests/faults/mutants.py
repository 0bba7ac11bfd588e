"""Test of the tester: seeded defects that the simulation must find within a few seeds.

Hash and nonce, the last lines of defence, are off for all of them. `tests/mutation/rules.py` has defects of sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from faults.simulation import MAX_NUM_SEQS, Simulation
from faults.target import WatchedClient, WatchedTarget
from msgspec.structs import replace

from amusd.policies.base import Decision, Wait
from amusd.protocol.messages import Candidate
from amusd.runtime.target_sequence import Request, TargetSequence
from amusd.sampling.stopping import StopChecker


class NeedsTheDraft(WatchedTarget):
    """The target does not go on without a candidate."""

    def admit(self, request: Request, stop: StopChecker) -> TargetSequence:
        sequence = super().admit(request, stop)
        decide = sequence.decide

        def wait(waited_ns: int, *, may_hear: bool) -> Decision:
            decision = decide(waited_ns, may_hear=may_hear)
            most = min(sequence._room, request.policy.max_lookahead)
            return Wait(0.05) if not sequence.session.num_candidates and most > 0 else decision

        sequence.decide = wait  # type: ignore[method-assign]
        return sequence


class NeverReminds(WatchedClient):
    """What a silent draft was told is believed to have arrived."""

    def answer(self, sequence: TargetSequence) -> None:
        if self.may_hear(sequence):
            self._send(sequence.session.verdict())


class NewestTakesAll(WatchedClient):
    """A candidate goes to the sequence that began last."""

    def _receive_candidate(self, message: Candidate) -> str:
        newest = max(self._sequences, default=message.sequence_id)
        return super()._receive_candidate(replace(message, sequence_id=newest))


@dataclass(frozen=True)
class Mutant:
    """One defect."""

    worker: type[WatchedTarget] = WatchedTarget
    client: type[WatchedClient] = WatchedClient
    patches: Mapping[str, Any] = field(default_factory=dict)
    """Dotted name -> what stands there instead."""
    most: int = 1
    """Answers at a time: one shows the same in less time, unless it is mixed up with others."""


MUTANTS: dict[str, Mutant] = {
    "NeedsTheDraft": Mutant(worker=NeedsTheDraft),
    "NewestTakesAll": Mutant(client=NewestTakesAll, most=MAX_NUM_SEQS),
    "NeverReminds": Mutant(client=NeverReminds),
    "DamageIsBelieved": Mutant(patches={"amusd.protocol.wire.zlib": SimpleNamespace(crc32=lambda _: 0)}),
}


def find(mutant: Mutant, num_seeds: int) -> str | None:
    """The violation by the first of so many seeds that shows it; None where none does."""
    with ExitStack() as stack:
        for name, replacement in mutant.patches.items():
            stack.enter_context(patch(name, replacement))
        for seed in range(num_seeds):
            parts = mutant.worker, mutant.client, mutant.most
            violation = Simulation(seed, *parts, is_bare=True).run().violation
            if violation is not None:
                return violation
    return None
