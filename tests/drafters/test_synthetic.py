"""The draft for measurements costs what a real draft does; how often it is right: test_tree.py."""

from __future__ import annotations

from collections.abc import Sequence

from table_model import TableModel

from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.synthetic import SyntheticDrafter
from amusd.models.kv_cache import KVCache
from amusd.models.passes import ModelOutput, Rows

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


def propose(drafter: AutoregressiveDrafter, path: list[int], number: int) -> list[int]:
    """The path with the next tokens of a chain."""
    return [*path, *drafter.propose(path, number)]


def test_the_model_does_what_it_would_do_for_a_drafter_of_its_own() -> None:
    """Prefill, single steps, several at once, acceptance and rollback: the same passes at the same positions."""
    models = real, synthetic = Model(), Model()
    drafters = (
        AutoregressiveDrafter(real),
        SyntheticDrafter(synthetic, 0.5, cache=synthetic.new_cache(200)),  # type: ignore[arg-type]
    )
    for drafter in drafters:
        drafter.open(PROMPT, 100)
        path = propose(drafter, propose(drafter, [], 1), 4)
        drafter.commit([*path[:2], 9, 9, 9])
        path = propose(drafter, [], 3)
        drafter.commit(path)
        propose(drafter, [], 85)
        drafter.close()
        drafter.open(PROMPT[:2], 50)
        propose(drafter, [], 2)
    assert models[0].calls == models[1].calls
    assert len(real.calls) > 6
