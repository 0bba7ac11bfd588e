"""The draft for measurements: right as often as told, at positions that the text decides, at a real draft's cost."""

from __future__ import annotations

from collections.abc import Sequence

from table_model import TableModel

from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.base import Drafter
from amusd.drafters.synthetic import SyntheticDrafter
from amusd.models.kv_cache import KVCache
from amusd.models.passes import ModelOutput, Rows
from amusd.protocol.draft_session import Node, Transition

VOCAB_SIZE = 20
PROMPT = (3, 1, 4, 1, 5)
LENGTH = 20_005
REFERENCE = (*PROMPT, *((i * i + i // 7) % VOCAB_SIZE for i in range(LENGTH - len(PROMPT))))


class Model(TableModel):
    """Writes down its calls: what each cost is decided by how many tokens went in and came out."""

    def __init__(self, max_length: int = 200) -> None:
        super().__init__(VOCAB_SIZE, seed=1, max_length=max_length)
        self.calls: list[tuple[str, int, int, int]] = []

    def prefill(self, token_ids: Sequence[int], cache: KVCache) -> None:
        self.calls.append(("prefill", cache.length, len(token_ids), 0))
        super().prefill(token_ids, cache)

    def run(self, batch: Sequence[Rows], steps: int = 1) -> list[ModelOutput]:
        self.calls += [("run", rows.cache.length, len(rows.token_ids), steps) for rows in batch]
        return super().run(batch)


def propose(drafter: Drafter, max_tokens: int) -> tuple[int, ...]:
    """The next tokens of a chain, which nothing but the model may end earlier."""
    last = Node(None, 0, drafter.length - 1, 1.0, 1.0)
    found = drafter.expand(last, [last], max_tokens)
    assert all(probability == 1.0 for ((_, probability),) in found)
    return tuple(token_id for ((token_id, _),) in found)


def cut(drafter: Drafter, length: int, *token_ids: int) -> None:
    """A verdict that leaves `length` tokens and commits these behind them."""
    drafter.follow(Transition((), token_ids, None, length + len(token_ids), 0, 0))


def test_the_model_does_what_it_would_do_for_a_drafter_of_its_own() -> None:
    """Prefill, single steps, several at once, acceptance and rollback: the same passes at the same positions."""
    real, synthetic = Model(), Model()
    drafters: tuple[Drafter, Drafter] = (
        AutoregressiveDrafter(real),
        SyntheticDrafter(AutoregressiveDrafter(synthetic), 0.5, 0.0, VOCAB_SIZE),
    )
    for drafter in drafters:
        drafter.open(PROMPT, 100)
        propose(drafter, 1)
        propose(drafter, 4)
        cut(drafter, 7, 9, 9, 9)
        propose(drafter, 3)
        cut(drafter, drafter.length)
        propose(drafter, 90)
        assert drafter.length == 100
        drafter.close()
        drafter.open(PROMPT[:2], 50)
        propose(drafter, 2)
    assert real.calls == synthetic.calls
    assert len(real.calls) > 6
