"""The synthetic drafter through the real workers: the target's own answer, accepted as often as asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from chains import propose
from runtime.pair import PROMPT, VOCAB_SIZE, decoding, pair, params, reference, target_model
from table_model import TableModel

from amusd.commands.generate import options_of
from amusd.config import Distribution
from amusd.drafters.base import Drafter
from amusd.drafters.model import ModelDrafter
from amusd.drafters.synthetic import SyntheticDrafter
from amusd.models.kv_cache import KVCache
from amusd.models.passes import ModelOutput, Rows
from amusd.protocol.draft_tree import Transition
from amusd.protocol.messages import Open
from amusd.runtime.draft_worker import draft_step
from amusd.runtime.rollback import RollbackManager
from amusd.sampling.acceptance import certain
from amusd.tracing.metrics import total


def synthetic(accept: float) -> dict[str, Callable[[], Drafter]]:
    model = target_model()
    return {"synthetic": lambda: SyntheticDrafter(model, accept, cache=model.new_cache(400))}  # type: ignore[arg-type]


def test_a_candidate_whose_predecessors_were_accepted_is_accepted_with_the_probability() -> None:
    """The target waits for each block, so that blocks are the same in each run."""
    accept, schedule = 0.8, decoding("synchronous", 4)
    with pair(synthetic(accept), pass_seconds=0.0) as (engine, _):
        told = [reference(150, (first, 7))[2:] for first in range(3)]
        answers = [
            engine.generate((first, 7), params(150), decoding=schedule, reference=told[first]) for first in range(3)
        ]
    assert [answer.token_ids for answer in answers] == told
    counts = total([answer.metrics for answer in answers])
    for before, after in itertools.pairwise((counts.num_drafts, *counts.accepted_by_position[:3])):
        assert before > 50
        assert after / before == pytest.approx(accept, abs=4 * (accept * (1 - accept) / before) ** 0.5)


def test_a_command_decodes_the_answer_in_advance_once_for_each_request() -> None:
    with pair(synthetic(1.0)) as (engine, _):
        options, schedule = options_of(engine), decoding("synchronous")
        assert options(PROMPT, params(8), decoding("autoregressive"))["reference"] == ()
        assert options(PROMPT, params(8), schedule, "ngram")["reference"] == ()
        for num_tokens in (8, 8, 9):
            told = options(PROMPT, params(num_tokens), schedule)["reference"]
            assert told == reference(num_tokens)[len(PROMPT) :]
        assert engine.worker.counts.num_tokens == 8 + 9


# The draft for measurements costs what a real draft does


class CountedModel(TableModel):
    """Records its calls by their tokens in and out, which decide the cost of each."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE, seed=1, max_length=200)
        self.calls: list[tuple[str, int, int, int]] = []

    def prefill(self, token_ids: Sequence[int], cache: KVCache) -> None:
        self.calls.append(("prefill", cache.length, len(token_ids), 0))
        super().prefill(token_ids, cache)

    def run(self, batch: Sequence[Rows], steps: int = 1) -> list[ModelOutput]:
        self.calls += [("run", rows.cache.length, len(rows.token_ids), steps) for rows in batch]
        return super().run(batch)


def test_the_model_does_what_it_would_do_for_a_drafter_of_its_own() -> None:
    """Prefill, single steps, several at once, acceptance and rollback: the same passes at the same positions."""
    models = real, synthetic = CountedModel(), CountedModel()
    drafters = (
        ModelDrafter(real),
        SyntheticDrafter(synthetic, 0.5, cache=synthetic.new_cache(200)),  # type: ignore[arg-type]
    )
    for drafter in drafters:
        drafter.open(PROMPT, 100)
        path = propose(drafter, 1)
        path += propose(drafter, 4, path)
        drafter.follow(Transition((), (*path[:2], 9, 9, 9), (), 0))
        path = propose(drafter, 3)
        drafter.follow(Transition((), path, (), 0))
        propose(drafter, 85)
        drafter.close()
        drafter.open(PROMPT[:2], 50)
        propose(drafter, 2)
    assert models[0].calls == models[1].calls
    assert len(real.calls) > 6


def test_under_the_ratio_test_what_replaces_the_models_draws_is_certain() -> None:
    ratio_test = Distribution(temperature=0.8, seed=5, acceptance="rejection")
    opening = Open(1, 1, PROMPT, 50, "synthetic", 8, 1, tuple(range(VOCAB_SIZE)), ratio_test.as_message())
    model = CountedModel()
    manager = RollbackManager(opening, SyntheticDrafter(model, 0.5))  # type: ignore[arg-type]
    manager.open()
    for _ in range(4):
        draft_step([manager])
    nodes = [*manager.session.tree.root.below()]
    assert [node.draft_probs for node in nodes] == [certain(node.token_id) for node in nodes]
    assert len(nodes) == len([call for call in model.calls if call[0] == "run"]) == 4
