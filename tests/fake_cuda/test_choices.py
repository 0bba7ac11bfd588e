"""On a GPU the tokens are those that the host would choose from the same logits."""

from __future__ import annotations

import pytest
from fake_cuda import builders
from fake_cuda.device import fake_cuda
from fake_cuda.workers import Target

from amusd.config import GREEDY, Distribution
from amusd.drafters.autoregressive import AutoregressiveDrafter

DISTRIBUTIONS = {
    "greedy": GREEDY,
    "wide top-p": Distribution(temperature=2.0, top_p=0.99, seed=3),
    "counts": Distribution(temperature=0.7, frequency_penalty=0.4, logit_bias=((9, 4.0), (3000, -100.0)), seed=3),
    "ratio test": Distribution(temperature=0.7, acceptance="rejection", seed=3),
}
PROMPT = [(7 * place * place + 3) % 4000 for place in range(20)]


def drafted(device: str, distribution: Distribution) -> list[int]:
    drafter = AutoregressiveDrafter(builders.small(device, **builders.as_draft(device)))
    drafter.set_distribution(distribution)
    drafter.open(PROMPT, 200)
    found = [*drafter.propose((), 5)]
    drafter.commit([*found[:2], 11, 12, 13])
    return [*found, *drafter.propose((), 8)]


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


@pytest.mark.parametrize("work", [drafted, answered])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_tokens_are_those_of_the_cpu(work: object, name: str) -> None:
    expected = work("cpu", DISTRIBUTIONS[name])  # type: ignore[operator]  # one of the functions above
    with fake_cuda(values=True) as gpus:
        assert work("cuda:1", DISTRIBUTIONS[name]) == expected  # type: ignore[operator]
    assert gpus.record.devices == {1}
    assert len({*expected}) > 3
