"""The draft for measurements costs what a real draft does; how often it is right: test_tree.py."""

from __future__ import annotations

from collections.abc import Sequence

from chains import propose
from table_model import TableModel

from amusd.config import Distribution
from amusd.drafters.model import ModelDrafter
from amusd.drafters.synthetic import SyntheticDrafter
from amusd.models.kv_cache import KVCache
from amusd.models.passes import ModelOutput, Rows
from amusd.protocol.draft_tree import Transition
from amusd.protocol.messages import Open
from amusd.runtime.draft_worker import draft_step
from amusd.runtime.rollback import RollbackManager
from amusd.sampling.acceptance import certain

VOCAB_SIZE = 20
PROMPT = (3, 1, 4, 1, 5)


class Model(TableModel):
    """Writes down its calls: what each cost is decided by how many tokens went in and came out."""

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
    models = real, synthetic = Model(), Model()
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


def test_under_the_ratio_test_what_replaces_the_model_s_draws_is_certain() -> None:
    ratio_test = Distribution(temperature=0.8, seed=5, acceptance="rejection")
    opening = Open(1, 1, PROMPT, 50, "synthetic", 8, 1, tuple(range(VOCAB_SIZE)), ratio_test.as_message())
    model = Model()
    manager = RollbackManager(opening, SyntheticDrafter(model, 0.5))  # type: ignore[arg-type]
    manager.open()
    for _ in range(4):
        draft_step([manager])
    nodes = [*manager.session.tree.root.below()]
    assert [node.probs for node in nodes] == [certain(node.token_id) for node in nodes]
    assert len(nodes) == len([call for call in model.calls if call[0] == "run"]) == 4
