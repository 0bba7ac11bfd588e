"""Every rule of the model does what the session does, in every state that the model reaches and for every message."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, takewhile
from typing import NamedTuple

import pytest
from model_checking import protocol_model
from model_checking.explorer import explore
from model_checking.protocol_model import Bounds, Draft, ProtocolModel, Refused, Target, Values
from protocol.sessions import Unhashed, nodes_of

from amusd.errors import PeerProtocolError
from amusd.protocol.candidate_tree import CandidateNode
from amusd.protocol.draft_session import DraftSession
from amusd.protocol.draft_tree import Node
from amusd.protocol.messages import CERTAINTY, Candidate, Open, Verdict
from amusd.protocol.target_session import TargetSession
from amusd.protocol.verification import Block

PROMPT = (0,)
ORIGIN = len(PROMPT)
REFUSED = "refused"


@pytest.fixture(scope="module", params=[1, 2], ids=["chain", "tree"])
def model(request: pytest.FixtureRequest) -> ProtocolModel:
    """Losses, and so new epochs, are left to the chain: a tree has too many states."""
    return ProtocolModel(Bounds(fan_out=request.param, max_nodes=2, max_incarnations=1, max_epoch=2 - request.param))


class Reached(NamedTuple):
    targets: set[Target]
    drafts: set[Draft]
    candidates: set[protocol_model.Candidate]
    verdicts: set[protocol_model.Verdict]


@pytest.fixture(scope="module")
def reached(model: ProtocolModel) -> Reached:
    targets, drafts, to_target, to_draft = zip(*explore(model).states, strict=True)
    return Reached({*targets}, {*drafts}, {*chain.from_iterable(to_target)}, {*chain.from_iterable(to_draft)})


def test_the_target_receives_as_the_model_does(model: ProtocolModel, reached: Reached) -> None:
    """Pairs that never meet count too: then both refuse, or neither does."""
    outcomes = set()
    for target in reached.targets:
        for candidate in reached.candidates:
            expected = outcome(lambda: facts(model.receive(target, candidate)), Refused)  # noqa: B023 - called at once
            assert received(target_session(model, target), candidate) == expected
            outcomes.add(expected == REFUSED)
    assert len(reached.targets) * len(reached.candidates) > 9_000
    assert outcomes == {True, False}


def test_the_targets_own_steps_are_the_models(model: ProtocolModel, reached: Reached) -> None:
    for target in reached.targets:
        if target.block is not None:
            assert committed(target_session(model, target)) == facts(model.commit(target))
        elif model.room(target) > 0:
            blocks = {facts(after) for after in model.begin(target)}
            for number in range(4):
                session = target_session(model, target)
                session.begin(number)
                assert session_facts(session) in blocks
        session = target_session(model, target)
        verdict = session.verdict()
        found = (verdict.incarnation, verdict.epoch, verdict.start - ORIGIN, verdict.token_ids)
        assert found == model.verdict(target)
        session.detach()
        assert session_facts(session) == facts(model.detach(target))
        session = target_session(model, target)
        session.attach(target.incarnation + 1)
        assert session_facts(session) == facts(model.attach(target))


def test_the_draft_hears_as_the_model_does(model: ProtocolModel, reached: Reached) -> None:
    for draft in reached.drafts:
        for verdict in reached.verdicts:
            expected = outcome(lambda: draft_facts(model.hear(draft, verdict)), Refused)  # noqa: B023 - called at once
            assert heard(draft_session(model, draft), verdict) == expected
    assert len(reached.drafts) * len(reached.verdicts) > 150


def test_the_drafts_own_steps_are_the_models(model: ProtocolModel, reached: Reached) -> None:
    for draft in reached.drafts:
        session = draft_session(model, draft)
        after, candidate = model.offer(draft)
        message = session.offer()
        if message is None:
            assert not candidate.tokens  # the model may repeat what the draft has said
            continue
        found = (message.incarnation, message.base - ORIGIN, message.first, message.parents, message.token_ids)
        assert found == (*candidate[:4], tuple(token.value for token in candidate.tokens))
        assert session_draft_facts(session) == draft_facts(after)


def test_a_draft_may_only_go_on_where_the_models_may(model: ProtocolModel, reached: Reached) -> None:
    for draft in reached.drafts:
        session = draft_session(model, draft)
        proposals = {next(iter(set(after.tree) - set(draft.tree))).path[:-1] for after in model.propose(draft)}
        while nodes := nodes_of(session):
            for node in nodes:
                if len(draft.tree) < model.bounds.max_nodes:
                    assert path_to(node) in proposals or node.children
            session.tree.grow(nodes, [[] for _ in nodes])


# A session in a state of the model


def target_session(model: ProtocolModel, target: Target) -> TargetSession:
    session = Unhashed(
        sequence_id=1,
        prompt=PROMPT,
        max_length=ORIGIN + model.bounds.max_length,
        vocab_size=model.bounds.vocab_size,
        fan_out=model.bounds.fan_out,
    )
    session._prefix.append(target.committed)
    nodes: dict[Values, CandidateNode] = {}
    for placed in sorted(target.tree, key=lambda placed: (len(placed.path), placed.number)):
        path, number = placed.path, placed.number
        if path not in nodes:
            siblings = session._tree.children if len(path) == 1 else nodes[path[:-1]].children
            position = session.committed_length + len(path) - 1
            nodes[path] = siblings[path[-1]] = CandidateNode(path[-1], number, CERTAINTY, None, position)
        nodes[path].number = number
        session._tree.nodes[number] = nodes[path]
    for number, at in target.passed:
        session._tree.nodes[number] = CandidateNode(0, number, CERTAINTY, None, ORIGIN + at)
    session.epoch = target.epoch
    session._next_number = target.next_number
    session._draft_base = ORIGIN + target.draft_base
    session.attached = target.attached
    session._incarnation = target.incarnation
    if target.block is not None:
        start = session.committed_length - 1
        session._block = Block(start, session.committed[start], target.block)
    return session


def draft_session(model: ProtocolModel, draft: Draft) -> DraftSession:
    bounds = model.bounds
    opening = Open(
        sequence_id=1,
        incarnation=draft.incarnation,
        token_ids=PROMPT + draft.known,
        max_length=ORIGIN + bounds.max_length,
        drafter="test",
        max_lookahead=bounds.max_lookahead,
        tokens_per_message=1,
        fan_out=bounds.fan_out,
    )
    session = DraftSession(opening)
    nodes: dict[Values, Node] = {(): session.tree.root}
    for drafted in draft.tree:
        parent = nodes[drafted.path[:-1]]
        parent.computed = True
        nodes[drafted.path] = session.tree._guess(parent, drafted.path[-1], 1.0, 0)
        nodes[drafted.path].number = drafted.number
    session.tree.unsent = [node for node in session.tree.unsent if not node.number]
    session.epoch = draft.epoch
    session._next_number = draft.next_number
    return session


# A session's actions, and its state after them: all of the model's state but the ghosts


def received(session: TargetSession, candidate: protocol_model.Candidate) -> object:
    number = len(candidate.tokens)
    message = Candidate(
        sequence_id=1,
        incarnation=candidate.incarnation,
        base=ORIGIN + candidate.base,
        prefix_hash=0,
        first=candidate.first,
        parents=candidate.parents,
        token_ids=tuple(token.value for token in candidate.tokens),
        weights=() if session._is_chain else (CERTAINTY,) * number,
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
        epoch=verdict.epoch,
        start=ORIGIN + verdict.start,
        token_ids=verdict.values,
    )

    def act() -> object:
        session.receive(message)
        return session_draft_facts(session)

    return outcome(act, PeerProtocolError)


def committed(session: TargetSession) -> object:
    num_accepted = len(tuple(takewhile(lambda token_id: token_id == 0, session.to_judge()[0])))
    number = min(num_accepted + 1, len(session._verifying().candidates) + 1, session.remaining)
    session.commit((0,) * number, min(num_accepted, number))
    return session_facts(session)


def outcome(act: Callable[[], object], refusal: type[Exception]) -> object:
    try:
        return act()
    except refusal:
        return REFUSED


def path_to(node: Node) -> Values:
    return () if node.parent is None else (*path_to(node.parent), node.token_id)


def facts(target: Target) -> object:
    return tuple(target._replace(tree=frozenset(placed._replace(drafted_from=()) for placed in target.tree)))


def session_facts(session: TargetSession) -> object:
    paths: dict[int, Values] = {}
    rest: list[tuple[Values, dict[int, CandidateNode]]] = [((), session._tree.children)]
    while rest:
        path, children = rest.pop()
        for node in children.values():
            paths[id(node)] = (*path, node.token_id)
            rest.append((paths[id(node)], node.children))
    nodes = session._tree.nodes.items()
    return (
        session.committed[ORIGIN:],
        frozenset(protocol_model.Node(number, paths[id(node)], ()) for number, node in nodes if id(node) in paths),
        frozenset((number, node.position - ORIGIN) for number, node in nodes if id(node) not in paths),
        session.epoch,
        session._next_number,
        session._draft_base - ORIGIN,
        session.attached,
        session._incarnation,
        None if session._block is None else session._block.candidates,
    )


def draft_facts(draft: Draft) -> object:
    return tuple(draft._replace(tree=tuple((node.number, node.path) for node in draft.tree)))


def session_draft_facts(session: DraftSession) -> object:
    offered = sorted((node for node in session.tree.root.below() if node.number), key=lambda node: node.number)
    tree = tuple((node.number, path_to(node)) for node in (*offered, *session.tree.unsent))
    return session.opening.incarnation, session.epoch, session.committed[ORIGIN:], tree, session._next_number
