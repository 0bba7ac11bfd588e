"""On a GPU the tokens are those that the host would choose from the same logits."""

from __future__ import annotations

import pytest
import torch
from chains import propose
from fake_cuda import builders
from fake_cuda.device import fake_cuda
from fake_cuda.workers import Target
from torch import Tensor

from amusd.config import GREEDY, Distribution
from amusd.drafters.model import ModelDrafter
from amusd.models.passes import Rows

DISTRIBUTIONS = {
    "greedy": GREEDY,
    "wide top-p": Distribution(temperature=2.0, top_p=0.99, seed=3),
    "counts": Distribution(temperature=0.7, frequency_penalty=0.4, logit_bias=((9, 4.0), (3000, -100.0)), seed=3),
    "ratio test": Distribution(temperature=0.7, acceptance="rejection", seed=3),
}
PROMPT = [(7 * place * place + 3) % 4000 for place in range(20)]


def drafted(device: str, distribution: Distribution) -> list[int]:
    drafter = ModelDrafter(builders.small(device, **builders.as_draft(device)))
    drafter.set_distribution(distribution)
    drafter.open(PROMPT, 200)
    found = [*propose(drafter, 5)]
    drafter.commit([*found[:2], 11, 12, 13])
    return [*found, *propose(drafter, 8)]


def answered(device: str, distribution: Distribution) -> tuple[int, ...]:
    target = Target(builders.small(device))
    target.open(PROMPT, distribution)
    while len(target.tokens) < 30:
        target.verify(())
    if distribution.rule == "rejection":
        return target.tokens
    known = target.tokens
    target.open(PROMPT, distribution)
    while len(target.tokens) < 30:
        start = len(target.tokens)
        target.verify((*known[start : start + start % 4], 7, 8))
    return target.tokens


ROPE = {"rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES = {
    "qwen2, with biases": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "llama3's rope": {
        "rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 64, **ROPE},
    },
    "mistral, untied": {"model_type": "mistral", "tie_word_embeddings": False},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_every_family_are_those_of_the_cpu(name: str) -> None:
    def logits(device: str) -> Tensor:
        model = builders.family(FAMILIES[name], device)
        cache = model.new_cache(200)
        model.prefill(PROMPT, cache)
        return model.run([Rows([5, 9, 11], cache)])[0].logits.float().cpu()

    expected = logits("cpu")
    with fake_cuda(values=True) as gpus:
        torch.testing.assert_close(logits("cuda:0"), expected, atol=1e-4, rtol=1e-4)
    assert gpus.record.replays
    assert expected.std() > 0.1


@pytest.mark.parametrize("work", [drafted, answered])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_tokens_are_those_of_the_cpu(work: object, name: str) -> None:
    expected = work("cpu", DISTRIBUTIONS[name])  # type: ignore[operator]  # one of the functions above
    with fake_cuda(values=True) as gpus:
        assert work("cuda:1", DISTRIBUTIONS[name]) == expected  # type: ignore[operator]
    assert gpus.record.devices == {1}
    assert len({*expected}) > 3
