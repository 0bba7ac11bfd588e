"""Every state that the protocol can reach within some bounds, whatever is lost, repeated, late or restarted."""

from __future__ import annotations

from itertools import chain

import pytest
from model_checking.explorer import explore
from model_checking.invariants import NO_REFUSAL, PROTOCOL
from model_checking.protocol_model import Bounds, ProtocolModel

EVERY_ACTION = {
    "target receives",
    "target begins",
    "target commits",
    "target sends",
    "target detaches",
    "target attaches a new incarnation",
    "draft proposes",
    "draft offers",
    "draft hears",
}


@pytest.mark.parametrize(
    ("bounds", "num_states", "num_edges"),
    [
        pytest.param(Bounds(), 38_000, 170_000, id="a chain"),
        pytest.param(Bounds(fan_out=2, max_nodes=2, max_epoch=0), 15_000, 70_000, id="a tree without losses"),
        pytest.param(
            Bounds(fan_out=2, max_nodes=2),
            116_000,
            540_000,
            id="a tree",
            marks=[pytest.mark.long, pytest.mark.timeout(3000)],
        ),
    ],
)
def test_every_invariant_holds_in_every_state(bounds: Bounds, num_states: int, num_edges: int) -> None:
    """The numbers are a lower limit: a search that was cut short by mistake proves nothing."""
    exploration = explore(ProtocolModel(bounds), (*PROTOCOL, NO_REFUSAL))
    print(f"{bounds}\n{exploration}")  # noqa: T201 - the finding itself
    assert exploration.breach is None
    assert exploration.num_states >= num_states
    assert exploration.num_edges >= num_edges
    assert set(exploration.actions) == EVERY_ACTION


def test_messages_that_the_search_drops_would_never_have_changed_anything() -> None:
    """Once spent, a message that has been sent stays spent in all that follows, and receiving it changes nothing."""
    model = ProtocolModel(Bounds(max_epoch=0))
    states = explore(model).states
    steps = [(state, step.state) for state in states for step in model.steps(state)]
    candidates = set(chain.from_iterable(state.to_target for state in states))
    verdicts = set(chain.from_iterable(state.to_draft for state in states))
    num_spent = 0
    for before, after in {(before.target, after.target) for before, after in steps}:
        for candidate in candidates:
            if candidate.incarnation <= before.incarnation and model.is_spent(before, candidate):
                num_spent += 1
                assert model.receive(before, candidate) == before
                assert model.is_spent(after, candidate)
    for before, after in {(before.draft, after.draft) for before, after in steps}:
        for verdict in verdicts:
            if verdict.incarnation <= before.incarnation and not model.is_news(before, verdict):
                num_spent += 1
                assert model.hear(before, verdict) == before
                assert not model.is_news(after, verdict)
    assert num_spent > 10_000
