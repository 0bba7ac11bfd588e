"""Seeded defects of the model: each has to break the invariant that stands for it, or none and for a reason."""

from __future__ import annotations

import pytest
from model_checking import mutants
from model_checking.explorer import Exploration, explore
from model_checking.invariants import NO_REFUSAL, PROTOCOL
from model_checking.protocol_model import Bounds, ProtocolModel

LONGER = Bounds(max_length=4, max_lives=1, max_in_flight=1)
SMALLER = Bounds(max_in_flight=1, max_epoch=2)

BREACHES = {
    mutants.NoIncarnation: "I6",
    mutants.RejectionKeepsEpoch: "I6",
    mutants.LateContradictionIgnored: "I6",
    mutants.EpochIgnored: "I6",
    mutants.PositionIgnored: "I6",
    mutants.SpeculationKept: "I6",
    mutants.TailKept: "I6",
    mutants.ChainKeptOverRestart: "I6",
    mutants.EpochKeptOnRollback: "I6",
    mutants.FloorPlusOne: "I6",
    mutants.HeardWhileGone: "I6",
    mutants.TokenTakenBack: "I1",
    mutants.LateCandidateUnjudged: "I2",
    mutants.FloorTakenForEpoch: "I3",
    mutants.OldVerdictHeard: "I4",
    mutants.DoubleBonus: "I5",
    mutants.Overshoot: "I5",
    mutants.DraftNeeded: "L1",
    mutants.VerdictNotCumulative: NO_REFUSAL,
}


@pytest.mark.parametrize("mutant", BREACHES, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_breaks_its_invariant(mutant: type[ProtocolModel]) -> None:
    # Two epochs that nobody has announced take a text of four tokens.
    bounds = LONGER if mutant is mutants.FloorPlusOne else Bounds()
    exploration = explore(mutant(bounds), (*PROTOCOL, BREACHES[mutant]))
    print(f"{mutant.__name__}: {mutant.__doc__}\n{exploration}")  # noqa: T201 - the counter-example
    assert exploration.broken == BREACHES[mutant]


def test_a_draft_that_goes_back_to_an_old_verdict_is_judged_behind_a_foreign_prefix_too() -> None:
    exploration = explore(mutants.OldVerdictHeard(Bounds(max_lives=1, max_epoch=0)), ("I6",))
    print(exploration)  # noqa: T201 - the counter-example
    assert exploration.broken == "I6"


@pytest.fixture(scope="module")
def unbroken() -> Exploration:
    return explore(ProtocolModel(SMALLER))


@pytest.mark.parametrize(
    "mutant",
    [
        # Epochs are only compared within one life, and no floor is above 0 when it begins.
        mutants.RestartGuessesEpoch,
        # Slower, as the target waits for what it lacks, but what it does get connects.
        mutants.LostNotOfferedAgain,
    ],
    ids=lambda mutant: mutant.__name__,
)
def test_a_harmless_change_breaks_nothing(mutant: type[ProtocolModel], unbroken: Exploration) -> None:
    exploration = explore(mutant(SMALLER))
    print(f"{mutant.__name__}: {mutant.__doc__}\n{exploration}")  # noqa: T201 - the finding itself
    assert exploration.breach is None
    assert exploration.num_states > 20_000
    assert exploration.actions != unbroken.actions
