"""Drafters that were made together: one step for several has the proposals that each would have alone."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from chains import propose, propose_together
from models import tiny
from models.blocks import BUCKETED, bucketed_model
from models.tiny import wrap_model

from amusd.config import GREEDY, Distribution, DrafterConfig
from amusd.drafters import factory
from amusd.drafters.base import Drafter
from amusd.models.attention import register_attention
from amusd.models.passes import ModelOutput, Rows
from amusd.protocol.draft_tree import Node
from amusd.protocol.messages import Open, Verdict
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner
from amusd.runtime.draft_worker import draft_step
from amusd.runtime.rollback import RollbackManager

NUMBER = 4
MAX_LENGTH = 90
SAMPLED = Distribution(temperature=0.8, seed=5)
PENALTIES = Distribution(temperature=0.7, top_k=40, repetition_penalty=1.4, presence_penalty=0.8, seed=6)
RATIO_TEST = Distribution(temperature=0.9, seed=7, acceptance="rejection")
TRANSFORMED = [GREEDY, SAMPLED, PENALTIES, SAMPLED]


@dataclass(frozen=True)
class Kind:
    drafter: DrafterConfig
    is_tree: bool
    distributions: Sequence[Distribution]
    most: int = NUMBER
    """Most drafters with work in one step. With several tokens a step they soon run out of it until a verdict."""

    def make(self, number: int) -> Sequence[Drafter]:
        if self.drafter.kind == "cascade":
            return factory.cascade_factory(bucketed_model(), factory.model_factory(LOOKUP, other_model()))(number)
        return factory.model_factory(self.drafter, bucketed_model())(number)


PLAIN = DrafterConfig(kind="hf", model="tiny")
LOOKUP = DrafterConfig(kind="embedded", min_lookup=2)
CASCADE = DrafterConfig(kind="cascade", model="tiny", inner="embedded")
KINDS = {
    "tree": Kind(PLAIN, True, TRANSFORMED),
    "tree with lookup": Kind(LOOKUP, True, TRANSFORMED),
    "chain": Kind(PLAIN, False, TRANSFORMED),
    "chain with lookup": Kind(LOOKUP, False, TRANSFORMED),
    "chain, ratio test": Kind(PLAIN, False, [RATIO_TEST, GREEDY, RATIO_TEST, SAMPLED]),
    "cascade": Kind(CASCADE, False, TRANSFORMED, most=2),
}


@functools.lru_cache
def other_model() -> ModelRunner:
    network = tiny.tiny_causal_lm(tiny.tiny_config(), register_attention())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return wrap_model(network, LoadOptions(numerics=BUCKETED, max_model_len=tiny.MAX_LENGTH))


def managers_of(kind: Kind, drafters: Sequence[Drafter], seed: int) -> list[RollbackManager]:
    rng, managers = random.Random(seed), []
    for number, (drafter, distribution) in enumerate(zip(drafters, kind.distributions, strict=True)):
        prompt = tuple(rng.choices(range(12), k=rng.randint(1, 40)))  # few ids: they recur
        reference = tuple(rng.choices(range(12), k=MAX_LENGTH - len(prompt)))
        shape = (3, rng.randint(1, 5)) if kind.is_tree else (1, 1)
        lookahead, per_message = rng.randint(2, 12), rng.choice([1, 1, 3])
        options = (lookahead, per_message, reference, distribution.as_message(), *shape)
        managers.append(RollbackManager(Open(number, 1, prompt, MAX_LENGTH, "test", *options), drafter))
        managers[-1].open()
    return managers


def tree_of(manager: RollbackManager) -> list[object]:
    return [
        (node.position, node.token_id, pytest.approx(node.probability, rel=1e-3), node.computed, node.draft_probs)
        for node in manager.session.tree.root.below()
    ]


def numbers_of(made: Sequence[tuple[Sequence[object], Sequence[object]]]) -> list[tuple[int, int]]:
    return [(len(nodes), len(found)) for nodes, found in made]


def some_verdict(manager: RollbackManager, rng: random.Random) -> Verdict:
    node: Node = manager.session.tree.root
    tokens: list[int] = []
    while node.children and rng.random() < 0.7:
        node = rng.choice(node.children)
        tokens.append(node.token_id)
    tokens += rng.choices(range(12), k=rng.choice([0, 1, 1, 2, 12]) if tokens else 1)
    base = manager.session.base
    return Verdict(manager.session.sequence_id, 1, 0, base, tuple(tokens[: MAX_LENGTH - base]))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", KINDS)
def test_a_step_for_several_is_a_step_for_each(name: str, seed: int) -> None:
    kind, rng = KINDS[name], random.Random(seed)
    together = managers_of(kind, kind.make(NUMBER), seed)
    alone = managers_of(kind, [kind.make(1)[0] for _ in range(NUMBER)], seed)
    most = 0
    for _ in range(25):
        asking = rng.sample(range(NUMBER), rng.randint(1, NUMBER))
        numbers = numbers_of(draft_step([together[index] for index in asking]))
        assert numbers == [number for index in asking for number in numbers_of(draft_step([alone[index]]))]
        most = max(most, sum(num_nodes > 0 for num_nodes, _ in numbers))
        for one, other in zip(together, alone, strict=True):
            assert tree_of(one) == tree_of(other)
        judged = rng.randrange(NUMBER)
        verdict = some_verdict(alone[judged], rng)
        assert (together[judged].apply(verdict) is None) == (alone[judged].apply(verdict) is None)
        assert [manager.num_looked_up for manager in together] == [manager.num_looked_up for manager in alone]
    assert most >= kind.most


@pytest.mark.parametrize(("kind", "num_steps"), [("tree", 2), ("chain", 2), ("cascade", 1)])
def test_several_share_the_passes_of_the_model(kind: str, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    drafters = KINDS[kind].make(NUMBER)
    model: ModelRunner = drafters[0].model  # type: ignore[attr-defined]
    run = model.run

    def spy(batch: Sequence[Rows], steps: int = 1) -> list[ModelOutput]:
        sizes.append(len(batch))
        return run(batch, steps)

    managers = managers_of(KINDS[kind], drafters, 1)
    monkeypatch.setattr(model, "run", spy)
    for _ in range(num_steps):
        draft_step(managers)
    assert sizes.count(NUMBER) == num_steps, "those that want more tokens go on without the others"


def test_one_without_numbers_keeps_no_other_from_proposing(monkeypatch: pytest.MonkeyPatch) -> None:
    drafters = KINDS["chain"].make(3)
    for number, drafter in enumerate(drafters):
        drafter.open([1, 2, 3 + number], 40)
    broken, run = drafters[1].text._cache, ModelRunner.run  # type: ignore[attr-defined]

    def spoilt(self: ModelRunner, batch: Sequence[Rows], steps: int) -> list[ModelOutput]:
        outputs = zip(batch, run(self, batch, steps), strict=True)
        return [ModelOutput(out.logits * (float("nan") if rows.cache is broken else 1.0)) for rows, out in outputs]

    monkeypatch.setattr(ModelRunner, "run", spoilt)
    proposed = propose_together(drafters, [(), (), ()], 2)
    monkeypatch.undo()
    (fresh,) = KINDS["chain"].make(1)
    for index in (0, 2):
        fresh.open([1, 2, 3 + index], 40)
        assert proposed[index] == propose(fresh, 2)
    assert proposed[1] == ()
    fresh.open([1, 2, 4], 40)
    assert propose(drafters[1], 2) == propose(fresh, 2)
