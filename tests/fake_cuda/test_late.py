"""Tokens on a GPU are those that the host would choose, however late its streams run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from chains import propose
from fake_cuda import builders
from fake_cuda.device import fake_cuda
from fake_cuda.workers import Target
from passes import forward, prefilled
from torch import Tensor

from amusd.checkpoints.loading import capture_for
from amusd.config import GREEDY, Distribution
from amusd.drafters.model import ModelDrafter

WIDE = Distribution(temperature=2.0, top_p=0.99, logit_bias=((9, 4.0), (3000, -100.0)), seed=3)
COUNTS = Distribution(temperature=0.7, top_p=0.95, frequency_penalty=0.4, seed=3)
RATIO_TEST = Distribution(temperature=0.7, acceptance="rejection", seed=3)
PROMPT = [place * place % 500 for place in range(20)]
SEEDS = range(8)


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


LATE = [(drafted, COUNTS), (answered, COUNTS), (answered, RATIO_TEST)]
AT_ONCE = [(drafted, GREEDY), (answered, GREEDY), (drafted, RATIO_TEST), (drafted, WIDE), (answered, WIDE)]


@pytest.mark.parametrize(
    ("work", "seed", "cuda_graphs"),
    [
        *((work, seed, graphs) for work in LATE for seed, graphs in ((0, True), (1, True), (5, True), (1, False))),
        *((work, None, True) for work in AT_ONCE),
    ],
)
def test_tokens_are_those_of_a_cpu(
    work: tuple[Callable[..., object], Distribution],
    seed: int | None,
    cuda_graphs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute, distribution = work
    if distribution is not WIDE:
        monkeypatch.setitem(builders._SMALL, "vocab_size", 512)
    monkeypatch.setattr(builders, "capture_for", lambda device, **_: capture_for(device, cuda_graphs=cuda_graphs))
    expected = compute("cpu", distribution)
    with fake_cuda(values=True, seed=seed) as gpus:
        assert compute("cuda:1", distribution) == expected
    assert gpus.record.devices == {1}
    assert bool(gpus.record.replays) == cuda_graphs


def result(seed: int, *, waits: bool, rewrites: bool = False) -> float:
    """The number that a stream makes of what another one copies to the device."""
    with fake_cuda(values=True, seed=seed):
        host, told = torch.ones(1, pin_memory=True), torch.zeros(1, pin_memory=True)
        device, stream, event = torch.zeros(1, device="cuda:0"), torch.cuda.Stream(), torch.cuda.Event()
        torch.cuda.synchronize()
        device.copy_(host, non_blocking=True)
        if rewrites:
            host.fill_(5)
        if waits:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            told.copy_(device * 2 + 1, non_blocking=True)
            event.record()
        assert seed != 1 or told.item() == 0  # the laziest one
        assert event.query()
        return told.item()


def test_streams_run_late_in_any_order_that_waits_allow() -> None:
    assert {result(seed, waits=True) for seed in SEEDS} == {3.0}
    assert {result(seed, waits=False) for seed in SEEDS} == {1.0, 3.0}
    assert {result(seed, waits=True, rewrites=True) for seed in SEEDS} == {3.0, 11.0}


ROPE = {"rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES = {
    "qwen2, with biases": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "llama3's rope": {"rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 64, **ROPE}},
    "mistral, untied": {"model_type": "mistral", "tie_word_embeddings": False},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_every_family_are_those_of_the_cpu(name: str) -> None:
    def logits(device: str) -> Tensor:
        model = builders.family(FAMILIES[name], device)
        cache = prefilled(model, PROMPT, 200)
        return forward(model, [5, 9, 11], cache).logits.float().cpu()

    expected = logits("cpu")
    with fake_cuda(values=True) as gpus:
        torch.testing.assert_close(logits("cuda:0"), expected, atol=1e-4, rtol=1e-4)
    assert gpus.record.replays
    assert expected.std() > 0.1
