"""Tokens do not depend on when a GPU does its work: streams run late, among each other in a random order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from fake_cuda import builders, test_choices
from fake_cuda.device import fake_cuda
from fake_cuda.test_choices import answered

from amusd.config import Distribution
from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.models.loading import capture_for

PROMPT = [place * place % 500 for place in range(20)]
COUNTS = Distribution(temperature=0.7, top_p=0.95, frequency_penalty=0.4, seed=3)
RATIO_TEST = Distribution(temperature=0.7, acceptance="rejection", seed=3)
SEEDS = range(8)


def drafted_together(device: str, distribution: Distribution) -> list[list[int]]:
    model = builders.small(device, **builders.as_draft(device))
    drafters = [AutoregressiveDrafter(model, cache=cache) for cache in model.new_caches(2, 100)]
    for number, drafter in enumerate(drafters):
        drafter.set_distribution(distribution)
        drafter.open(PROMPT[number:], 100)
    found = AutoregressiveDrafter.propose_together(drafters, [[], []], [4, 4])
    drafters[0].commit([*found[0][:1], 11])
    return [*found, *AutoregressiveDrafter.propose_together(drafters, [[], found[1]], [4, 4])]


@pytest.mark.parametrize(("seed", "cuda_graphs"), [(0, True), (1, True), (5, True), (1, False)])
@pytest.mark.parametrize(
    ("work", "distribution"), [(drafted_together, COUNTS), (answered, COUNTS), (answered, RATIO_TEST)]
)
def test_tokens_are_those_of_a_cpu(
    work: Callable[..., object],
    distribution: Distribution,
    seed: int,
    cuda_graphs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(builders._SMALL, "vocab_size", 512)
    monkeypatch.setattr(test_choices, "PROMPT", PROMPT)
    monkeypatch.setattr(builders, "capture_for", partial(_capture_for, cuda_graphs))
    expected = work("cpu", distribution)
    with fake_cuda(values=True, seed=seed) as gpus:
        assert work("cuda:1", distribution) == expected
    assert bool(gpus.record.replays) == cuda_graphs


def _capture_for(wanted: bool, device: str, *, cuda_graphs: bool) -> object:
    return capture_for(device, cuda_graphs=cuda_graphs and wanted)


def sums(seed: int, *, waits: bool, rewrites: bool = False) -> list[float]:
    """What one stream makes of what a copy, which another does, brings to a device."""
    with fake_cuda(values=True, seed=seed):
        host, result = torch.ones(2, pin_memory=True), torch.zeros(2, pin_memory=True)
        device, stream, event = torch.zeros(2, device="cuda:0"), torch.cuda.Stream(), torch.cuda.Event()
        torch.cuda.synchronize()
        device.copy_(host, non_blocking=True)
        if rewrites:
            host.fill_(5)
        if waits:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result.copy_(device * 2 + 1, non_blocking=True)
            event.record()
        assert event.query()
        return [*result.tolist()]


def test_streams_run_in_any_order_that_waits_allow() -> None:
    assert {sums(seed, waits=True)[0] for seed in SEEDS} == {3.0}
    assert {sums(seed, waits=False)[0] for seed in SEEDS} == {1.0, 3.0}


def test_a_copy_reads_the_host_when_it_runs() -> None:
    assert {sums(seed, waits=True, rewrites=True)[0] for seed in SEEDS} == {3.0, 11.0}


def test_what_has_not_run_yet_is_not_on_the_host() -> None:
    with fake_cuda(values=True, seed=0):
        made, host = torch.ones(2, device="cuda:0") + 1, torch.zeros(2, pin_memory=True)
        host.copy_(made, non_blocking=True)
        assert host.tolist() == [0.0, 0.0]
        assert made.tolist() == host.tolist() == [2.0, 2.0]
