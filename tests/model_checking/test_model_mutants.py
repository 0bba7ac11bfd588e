"""Seeded defects of the model: each has to break the invariant that stands for it, or none and for a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from model_checking import mutants
from model_checking.explorer import Exploration, explore
from model_checking.invariants import NO_REFUSAL, PROTOCOL
from model_checking.protocol_model import Bounds, ProtocolModel

CHAIN, TREE = Bounds(), Bounds(fan_out=2, max_nodes=2)
MORE_MESSAGES = {"max_in_flight": 2, "max_lives": 1, "max_epoch": 0}
SMALLER = Bounds(max_epoch=1, max_lookahead=1)

BREACHES = {
    mutants.NoIncarnation: "I6",
    mutants.TreeKept: "I6",
    mutants.LateContradictionIgnored: "I6",
    mutants.RootIgnored: "I6",
    mutants.PassedForgotten: "I6",
    mutants.OrphansTaken: "I6",
    mutants.TreeKeptOverRestart: "I6",
    mutants.SpeculationKept: "I6",
    mutants.ParentsUnnamed: "I6",
    mutants.TokenTakenBack: "I1",
    mutants.LateCandidateUnjudged: "I2",
    mutants.OldVerdictHeard: "I4",
    mutants.DoubleBonus: "I5",
    mutants.Overshoot: "I5",
    mutants.DraftNeeded: "L1",
    mutants.VerdictNotCumulative: NO_REFUSAL,
}


@pytest.mark.parametrize("bounds", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("mutant", BREACHES, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_breaks_its_invariant(mutant: type[ProtocolModel], bounds: Bounds) -> None:
    if mutant is mutants.OldVerdictHeard:  # an old verdict is one that a newer one has overtaken
        bounds = replace(bounds, **MORE_MESSAGES)
    exploration = explore(mutant(bounds), (*PROTOCOL, BREACHES[mutant]))
    print(f"{mutant.__name__}: {mutant.__doc__}\n{exploration}")  # noqa: T201 - the counter-example
    assert exploration.broken == BREACHES[mutant]


@pytest.fixture(scope="module")
def unbroken() -> Exploration:
    return explore(ProtocolModel(SMALLER))


@pytest.mark.parametrize(
    "mutant",
    [
        # A verdict of an earlier epoch commits no more than a newer one.
        mutants.EpochTakenOver,
        # Where a node stands is told by its number and by what is committed, not by who is there.
        mutants.HeardWhileGone,
        # Numbers are only compared within one life; a gap before the first costs a new epoch.
        mutants.RestartGuessesNumber,
        # Slower, as the target waits for what it lacks, but what it does get connects.
        mutants.LostNotOfferedAgain,
    ],
    ids=lambda mutant: mutant.__name__,
)
def test_a_harmless_change_breaks_nothing(mutant: type[ProtocolModel], unbroken: Exploration) -> None:
    exploration = explore(mutant(SMALLER))
    print(f"{mutant.__name__}: {mutant.__doc__}\n{exploration}")  # noqa: T201 - the finding itself
    assert exploration.breach is None
    assert exploration.num_states > 1_000
    assert exploration.actions != unbroken.actions or mutant is mutants.EpochTakenOver
