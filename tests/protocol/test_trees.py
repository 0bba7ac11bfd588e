"""Trees of candidates: the sessions' behaviour, case by case, with several candidates at a position."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from protocol.sessions import attached, hash_of, hear, judge, nodes_of, offered

from amusd.protocol.draft_session import DraftSession
from amusd.protocol.draft_tree import Guesses, Node, next_nodes
from amusd.protocol.messages import CERTAINTY, Candidate, Open, Verdict
from amusd.protocol.target_session import TargetSession
from amusd.protocol.verification import Block, PassOutcome, Tracks

PROMPT = (1, 2, 3)
OPENING = Open(1, 1, PROMPT, 20, "test", 6, 1, fan_out=2, rows_per_step=2)
HALF = CERTAINTY // 2


def target() -> TargetSession:
    return attached(PROMPT, fan_out=2)


def nodes(first: int, *nodes: tuple[int, int, int], after: tuple[int, ...] = PROMPT) -> Candidate:
    parents, token_ids, weights = zip(*nodes, strict=True) if nodes else ((), (), ())
    return Candidate(1, 1, len(after), hash_of(after), first, parents, token_ids, weights, more=True)


# The target


def test_the_likeliest_child_at_each_node_makes_the_path() -> None:
    session = target()
    session.receive(nodes(1, (0, 4, HALF), (0, 5, HALF + 1), (2, 6, 10), (1, 7, CERTAINTY)))
    assert session.candidates == session.begin(6).candidates == (5, 6)


def test_a_node_at_the_new_base_of_the_draft_is_remembered_when_it_was_committed_before() -> None:
    session = target()
    session.receive(nodes(1, (0, 4, HALF), (1, 5, HALF)))
    judge(session, 4, 5, accepted=2)
    after = (*PROMPT, 4)  # the draft has heard of 4 alone
    assert session.receive(nodes(3, (2, 6, HALF), after=after)) == "taken"
    assert session.begin(6).candidates == (6,)


def test_a_candidate_that_comes_during_the_pass_is_judged_after_one_path_only() -> None:
    session = target()
    session.receive(nodes(1, (0, 4, HALF), (0, 5, 10)))
    session.begin(6)
    session.receive(nodes(3, (1, 6, 10), (1, 7, HALF), (0, 8, CERTAINTY)))
    assert session.to_judge()[0] == (4, 7)  # also where a likelier path has come meanwhile
    assert session.commit((4, 7), 2).num_late_accepted == 1
    session.receive(nodes(6, (4, 9, HALF), (4, 10, HALF)))
    assert len(session.begin(6, num_tracks=2, max_rows=8).alternatives) == 1
    session.receive(nodes(8, (6, 11, HALF)))
    session.commit((9, 12), 1)


def test_a_node_that_was_offered_again_goes_by_its_new_number() -> None:
    """A message was lost, so the draft has offered its tree again; new nodes name their parents by the new numbers."""
    session = target()
    session.receive(nodes(1, (0, 4, HALF), (1, 5, HALF)))
    session.receive(nodes(4, (2, 6, HALF)))  # number 3 was lost
    session.receive(nodes(5, (0, 4, HALF), (5, 5, HALF), (6, 6, HALF)))
    judge(session, 4, accepted=1)
    assert session.receive(nodes(8, (7, 7, HALF))) == "taken"
    assert session.begin(6).candidates == (5, 6, 7)
    session.commit((5, 6, 7, 8), 3)
    assert session.receive(nodes(9, (8, 8, HALF), (9, 10, HALF))) == "taken"
    assert session.begin(6).candidates == (10,)


# The draft


def grown() -> DraftSession:
    session = DraftSession(OPENING)
    (root,) = nodes_of(session)
    session.tree.grow([root], [[(4, 0.6), (5, 0.3)]])
    first, _second = nodes_of(session)
    session.tree.grow([first], [[(6, 0.5), (7, 0.2)]])
    return session


def verdict(*tokens: int, start: int = 3) -> Verdict:
    return Verdict(1, 1, 0, start, tokens)


def test_the_likeliest_guesses_are_computed_first_whatever_their_depth() -> None:
    session = DraftSession(OPENING)
    (root,) = nodes_of(session)
    assert root is session.tree.root
    session.tree.grow([root], [[(4, 0.6), (5, 0.3)]])
    assert [node.token_id for node in nodes_of(session)] == [4, 5]
    session = grown()
    session.tree.grow([session.tree.root.children[1]], [[(8, 0.9)]])
    assert [(node.token_id, round(node.probability, 2)) for node in nodes_of(session)] == [(6, 0.3), (8, 0.27)]


shares = st.floats(0, 1, allow_subnormal=False)
weights = st.lists(st.floats(0.08, 0.99), min_size=1, max_size=4)


def with_guesses(of_root: Sequence[float], of_first: Sequence[float] = ()) -> DraftSession:
    session = DraftSession(replace(OPENING, rows_per_step=8))
    session.tree.grow(*_root_with(session, *enumerate(of_root)))
    if of_first:
        session.tree.grow(next_nodes([session.tree], 1.0)[0][:1], [list(enumerate(of_first))])
    return session


@given(st.lists(st.tuples(weights, weights), min_size=1, max_size=6), st.lists(st.booleans(), max_size=6), shares)
def test_one_step_takes_the_nodes_that_are_worth_most_as_long_as_a_further_one_pays(
    trees: list[tuple[list[float], list[float]]], adopted: list[bool], share: float
) -> None:
    sessions = [with_guesses(*tree) for tree in trees]
    for session, adopts in zip(sessions, adopted, strict=False):
        if adopts:
            hear(session, verdict(session.tree.root.children[0].token_id))
    ready = [1 + sum(node.probability for node in session.tree.root.below()) for session in sessions]
    taken = next_nodes([session.tree for session in sessions], share)
    values = [[node.probability / ready[index] for node in nodes] for index, nodes in enumerate(taken)]
    assert all(ordered == sorted(ordered, reverse=True) for ordered in values)
    together = sorted((value for ordered in values for value in ordered), reverse=True)
    assert together
    for number, value in enumerate(together):
        assert value * (1 + share * (number - 1)) >= sum(together[:number]) * share - 1e-9
    left = [session.tree.value_of_next(len(nodes)) for session, nodes in zip(sessions, taken, strict=True)]
    assert max(left) <= together[-1]
    assert max(left) == 0 or max(left) * (1 + share * (len(together) - 1)) < sum(together) * share + 1e-9


def test_a_verdict_that_the_tree_foresaw_keeps_its_subtree() -> None:
    session = grown()
    session.offer()
    transition = hear(session, verdict(4))
    assert (transition.token_ids, [node.token_id for node in transition.kept]) == ((), [4])
    assert session.tree.root.token_id == 4
    assert [(node.token_id, node.probability) for node in session.tree.root.children] == [(6, 0.5), (7, 0.2)]
    assert [node.token_id for node in nodes_of(session)] == [6, 7]
    session.tree.grow([session.tree.root.children[0]], [[(8, 0.5)]])
    message = offered(session)
    assert (message.base, message.first, message.parents) == (4, 5, (3,))


def test_an_unlikely_guess_is_made_when_a_verdict_has_made_it_likely() -> None:
    session = DraftSession(OPENING)
    session.tree.grow(*_root_with(session, (4, 0.3)))
    root = session.tree.root
    session.tree.grow([root.children[0]], [[(6, 0.4), (7, 0.01), (8, 0.001)]])
    assert [child.token_id for child in root.children[0].children] == [6]
    session.offer()
    hear(session, verdict(4))
    assert [child.token_id for child in session.tree.root.children] == [6, 7]
    assert session.tree.num_nodes == 2
    message = offered(session)
    assert message.token_ids == (7,)
    assert nodes_of(session) == tuple(session.tree.root.children)
    hear(session, verdict(7, start=4))
    assert nodes_of(session) == (session.tree.root,)


def test_what_was_looked_up_is_not_guessed_again() -> None:
    session = DraftSession(OPENING)
    assert session.tree.guess_path([4, 5], 0.0) == 0
    assert session.tree.guess_path([4, 5], 0.85) == 2
    (root,) = nodes_of(session)
    session.tree.grow([root], [[(4, 0.6), (6, 0.2)]])
    assert [child.token_id for child in root.children] == [4, 6]
    assert session.tree.num_nodes == 3


def _root_with(session: DraftSession, *guesses: tuple[int, float]) -> tuple[tuple[Node, ...], list[Guesses]]:
    return nodes_of(session)[:1], [list(guesses)]


# Several paths in one pass


def random_tree(rng: random.Random) -> tuple[TargetSession, dict[tuple[int, ...], float]]:
    paths: list[tuple[int, ...]] = [()]
    chances = {(): 1.0}
    sent = []
    for number in range(1, rng.randint(2, 30)):
        parent, weight = rng.randrange(number), rng.randrange(1, CERTAINTY)
        token = rng.choice([token for token in range(30) if (*paths[parent], token) not in chances])
        paths.append((*paths[parent], token))
        chances[paths[-1]] = chances[paths[parent]] * weight / CERTAINTY
        sent.append((parent, token, weight))
    session = target()
    assert session.receive(nodes(1, *sent)) == "taken"
    return session, chances


@pytest.mark.parametrize("seed", range(12))
def test_a_pass_takes_the_likeliest_candidates_that_have_a_track(seed: int) -> None:
    rng = random.Random(seed)
    session, chances = random_tree(rng)
    num_tracks, max_rows, depth = rng.randint(2, 4), rng.randint(2, 12), rng.randint(1, 8)
    block = session.begin(depth, num_tracks=num_tracks, max_rows=max_rows)
    paths: list[tuple[int, ...]] = [()]
    tracks, track_of = Tracks(num_tracks), [0]
    for token, parent in zip(block.token_ids[1:], block.parents, strict=True):
        paths.append((*paths[parent], token))
        track = tracks.place(len(paths[-1]), track_of[parent])
        assert track is not None
        track_of.append(track)
    assert len(set(paths)) == len(paths) <= max_rows
    assert max(map(len, paths)) <= depth
    assert [row for row, track in enumerate(track_of) if track == 0] == list(range(len(block.candidates) + 1))
    for path in paths[1:]:  # none likelier was left beside it
        siblings = [chances[other] for other in chances if other and other[:-1] == path[:-1] and other not in paths]
        assert all(chance <= chances[path] for chance in siblings)
    if len(paths) < max_rows:
        for path in chances.keys() - set(paths):
            if len(path) <= depth and path[:-1] in paths:
                assert tracks.place(len(path), track_of[paths.index(path[:-1])]) is None


LINKS = [(0, 5, 0.6), (0, 6, 0.4), (1, 7, 0.5), (2, 8, 0.9), (4, 9, 0.9)]
FORKED = [(parent, token_id, round(share * CERTAINTY)) for parent, token_id, share in LINKS]


def test_what_is_judged_is_the_path_that_was_taken() -> None:
    session = target()
    assert session.receive(nodes(1, *FORKED)) == "taken"
    block = session.begin(4, num_tracks=3, max_rows=6)
    assert (block.candidates, block.alternatives, block.parents) == ((5, 7), (6, 8, 9), (0, 1, 0, 3, 4))
    assert block.judged_along(()) == block.judged_along((5,)) == (5, 7)
    assert block.judged_along((6,)) == (6, 8, 9)
    found = {
        (tokens, accepted): "".join(source[0] for source in block.sources_along(tokens, accepted))
        for tokens, accepted in (((5, 7, 1), 2), ((5, 8), 1), ((6, 8, 1), 2), ((6, 1), 1), ((6,), 0))
    }
    assert list(found.values()) == ["cct", "ct", "aat", "at", "t"]
    assert Block(4, 3, (5,)).sources_along((5, 7), 2) == ("candidate",) * 2  # the second came late
    for tokens, num_accepted in (((7,), 1), ((6, 7), 2), ((5, 8, 1), 2)):
        with pytest.raises(AssertionError, match=r"accepted of|are not the candidates"):
            session.commit(tokens, num_accepted)
    assert session.commit((6, 8, 1), 2) == PassOutcome(
        num_candidates=2, num_judged=3, num_accepted=2, num_alternatives=3, num_accepted_alternatives=2, num_tokens=3
    )
    assert session.committed == (*PROMPT, 6, 8, 1)


def test_candidates_less_likely_than_their_row_is_worth_are_left_out() -> None:
    session = target()
    session.receive(nodes(1, *FORKED))
    block = session.begin(4, num_tracks=3, max_rows=6, min_chance=0.35)  # 0.6, 0.4, 0.36; not 0.3, nor 0.32 after 8
    assert (block.candidates, block.alternatives, block.parents) == ((5,), (6, 8), (0, 0, 2))


@pytest.mark.parametrize("fan_out", [1, 2])
def test_no_node_stands_at_the_last_position_where_the_target_alone_writes(fan_out: int) -> None:
    opening = Open(1, 1, (1, 2, 3, 4), 6, "any", 16, 1, fan_out=fan_out, rows_per_step=fan_out)
    session = DraftSession(opening)
    assert session.tree.room == 1
    session.tree.grow(nodes_of(session), [[(7, 0.9)]])
    assert [node.position for node in session.tree.root.below()] == [4]
    assert not session.tree.has_work
