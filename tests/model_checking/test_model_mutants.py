"""Seeded defects of the model: each has to break the invariant that stands for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from model_checking import mutants
from model_checking.explorer import explore
from model_checking.invariants import NO_REFUSAL, PROTOCOL
from model_checking.protocol_model import Bounds, ProtocolModel

CHAIN, TREE = Bounds(), Bounds(fan_out=2, max_nodes=2)
MORE_MESSAGES = {"max_in_flight": 2, "max_lives": 1, "max_epoch": 0}

BREACHES = {
    mutants.NoIncarnation: "I6",
    mutants.TreeKept: "I6",
    mutants.OrphansTaken: "I6",
    mutants.TokenTakenBack: "I1",
    mutants.LateCandidateUnjudged: "I2",
    mutants.OldVerdictHeard: "I4",
    mutants.DoubleBonus: "I5",
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
