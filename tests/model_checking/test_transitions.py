"""Every rule of the model does what the session does, in every state that the model reaches and for every message.

`conformance.py` shows that what the sessions happen to do is in the model. Here they are put into each state in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pytest
from model_checking import protocol_model
from model_checking.explorer import Exploration, explore
from model_checking.protocol_model import Bounds, Draft, ProtocolModel, Refused, Target, values_of
from protocol.test_mutants import FloorPlusOne, TailNotOfferedAgain, Unhashed

from amusd.errors import PeerProtocolError
from amusd.protocol.draft_session import DraftSession
from amusd.protocol.messages import Candidate, Open, Verdict
from amusd.protocol.target_session import TargetSession
from amusd.protocol.token_stream import TokenStream
from amusd.protocol.verification import Block
from amusd.sampling.equality import accept_equal

BOUNDS = Bounds(max_in_flight=1, max_epoch=1)
PROMPT = (0,)
ORIGIN = len(PROMPT)
REFUSED = "refused"


@pytest.fixture(scope="module")
def model() -> ProtocolModel:
    return ProtocolModel(BOUNDS)


@pytest.fixture(scope="module")
def exploration(model: ProtocolModel) -> Exploration:
    return explore(model)


@pytest.fixture(scope="module")
def targets(exploration: Exploration) -> set[Target]:
    return {state.target for state in exploration.states}


@pytest.fixture(scope="module")
def drafts(exploration: Exploration) -> set[Draft]:
    return {state.draft for state in exploration.states}


@pytest.fixture(scope="module")
def candidates(exploration: Exploration) -> set[protocol_model.Candidate]:
    return set(chain.from_iterable(state.to_target for state in exploration.states))


@pytest.fixture(scope="module")
def verdicts(exploration: Exploration) -> set[protocol_model.Verdict]:
    return set(chain.from_iterable(state.to_draft for state in exploration.states))


def test_the_target_receives_as_the_model_does(
    model: ProtocolModel, targets: set[Target], candidates: set[protocol_model.Candidate]
) -> None:
    """Also what never meets: then both refuse, or neither does."""
    outcomes = set()
    for target in targets:
        for candidate in candidates:
            expected = outcome(lambda: facts(model.receive(target, candidate)), Refused)  # noqa: B023 - called at once
            assert received(target_session(target), candidate) == expected
            outcomes.add(expected == REFUSED)
    assert len(targets) * len(candidates) > 20_000
    assert outcomes == {True, False}


def test_the_targets_own_steps_are_the_models(model: ProtocolModel, targets: set[Target]) -> None:
    for target in targets:
        if target.block is not None:
            assert committed(target_session(target)) == facts(model.commit(target))
        elif model.room(target) > 0:
            blocks = {begun(target_session(target), number) for number in range(len(target.tail) + 1)}
            assert blocks == {facts(after) for after in model.begin(target)}
        session = target_session(target)
        verdict = session.verdict()
        found = (verdict.incarnation, verdict.epoch_floor, verdict.start - ORIGIN, verdict.token_ids)
        assert found == model.verdict(target)
        session.detach()
        assert session_facts(session) == facts(model.detach(target))
        session = target_session(target)
        session.attach(target.incarnation + 1)
        assert session_facts(session) == facts(model.attach(target))


def test_the_draft_hears_as_the_model_does(
    model: ProtocolModel, drafts: set[Draft], verdicts: set[protocol_model.Verdict]
) -> None:
    for draft in drafts:
        for verdict in verdicts:
            expected = outcome(lambda: draft_facts(model.hear(draft, verdict)), Refused)  # noqa: B023 - called at once
            assert heard(draft_session(draft), verdict) == expected
    assert len(drafts) * len(verdicts) > 1_000


def test_the_drafts_own_steps_are_the_models(model: ProtocolModel, drafts: set[Draft]) -> None:
    for draft in drafts:
        session = draft_session(draft)
        assert (session.room > 0) == any(model.propose(draft))
        after, candidate = model.offer(draft)
        message = session.offer()
        if message is None:
            assert not candidate.tokens  # the model may repeat what the draft has said
            continue
        found = (message.incarnation, message.epoch, message.base - ORIGIN, message.start - ORIGIN, message.token_ids)
        assert found == (*candidate[:4], values_of(candidate.tokens))
        assert session_draft_facts(session) == draft_facts(after)


def test_a_session_with_a_broken_rule_does_something_else(
    targets: set[Target],
    candidates: set[protocol_model.Candidate],
    drafts: set[Draft],
    verdicts: set[protocol_model.Verdict],
) -> None:
    assert any(
        received(target_session(target, FloorPlusOne), candidate) != received(target_session(target), candidate)
        for target in targets
        for candidate in candidates
    )
    assert any(
        heard(draft_session(draft, TailNotOfferedAgain), verdict) != heard(draft_session(draft), verdict)
        for draft in drafts
        for verdict in verdicts
    )


# A session in a state of the model


def target_session(target: Target, session_class: type[TargetSession] = Unhashed) -> TargetSession:
    """Without the hash, as the model is."""
    session = session_class(
        sequence_id=1,
        prompt=PROMPT,
        max_length=ORIGIN + BOUNDS.max_length,
        vocab_size=BOUNDS.vocab_size,
        max_lookahead=BOUNDS.max_lookahead,
    )
    session._stream = TokenStream(PROMPT + target.committed)
    session._stream.extend_tail(values_of(target.tail))
    session._epoch_floor = target.floor
    session._chain_epoch = target.chain_epoch
    session._chain_end = ORIGIN + target.chain_end
    session._draft_base = ORIGIN + target.draft_base
    session._attached = target.attached
    session._incarnation = target.incarnation
    if target.block is not None:
        start = session.committed_length - 1
        session._block = Block(start, session.committed[start], values_of(target.block))
    return session


def draft_session(draft: Draft, session_class: type[DraftSession] = DraftSession) -> DraftSession:
    opening = Open(
        sequence_id=1,
        incarnation=draft.incarnation,
        token_ids=PROMPT + draft.known,
        max_length=ORIGIN + BOUNDS.max_length,
        drafter="test",
        max_lookahead=BOUNDS.max_lookahead,
        tokens_per_message=1,
    )
    session = session_class(opening)
    session._stream.extend_tail(values_of(draft.chain))
    session._epoch = draft.epoch
    session._offered_length = ORIGIN + draft.offered
    return session


# What a session does, and what it is then: all of the model's state but the ghosts


def received(session: TargetSession, candidate: protocol_model.Candidate) -> object:
    message = Candidate(
        sequence_id=1,
        incarnation=candidate.incarnation,
        epoch=candidate.epoch,
        base=ORIGIN + candidate.base,
        start=ORIGIN + candidate.start,
        token_ids=values_of(candidate.tokens),
        prefix_hash=0,
        more=True,
    )

    def act() -> object:
        session.receive(message)
        return session_facts(session)

    return outcome(act, PeerProtocolError)


def heard(session: DraftSession, verdict: protocol_model.Verdict) -> object:
    message = Verdict(
        sequence_id=1,
        incarnation=verdict.incarnation,
        epoch_floor=verdict.floor,
        start=ORIGIN + verdict.start,
        token_ids=verdict.values,
        num_accepted=0,
    )

    def act() -> object:
        transition = session.preview(message)
        if transition is not None:
            session.apply(transition)
        return session_draft_facts(session)

    return outcome(act, PeerProtocolError)


def begun(session: TargetSession, number: int) -> object:
    session.begin(number)
    return session_facts(session)


def committed(session: TargetSession) -> object:
    judged = session.candidates_to_judge()
    scored = (0,) * (len(session._verifying().candidates) + 1)
    acceptance = accept_equal(scored, judged)
    token_ids = acceptance.token_ids[: session.remaining]
    session.commit(token_ids, min(acceptance.num_accepted, len(token_ids)))
    return session_facts(session)


def outcome(act: Callable[[], object], refusal: type[Exception]) -> object:
    try:
        return act()
    except refusal:
        return REFUSED


def facts(target: Target) -> object:
    block = None if target.block is None else values_of(target.block)
    return tuple(target._replace(tail=values_of(target.tail), block=block))


def session_facts(session: TargetSession) -> object:
    return (
        session.committed[ORIGIN:],
        session._stream.tail,
        session.epoch_floor,
        session._chain_epoch,
        session._chain_end - ORIGIN,
        session._draft_base - ORIGIN,
        session.attached,
        session._incarnation,
        None if session._block is None else session._block.candidates,
    )


def draft_facts(draft: Draft) -> object:
    return tuple(draft._replace(chain=values_of(draft.chain)))


def session_draft_facts(session: DraftSession) -> object:
    stream, base = session.token_ids, session.base
    return session.incarnation, session.epoch, stream[ORIGIN:base], stream[base:], session._offered_length - ORIGIN
