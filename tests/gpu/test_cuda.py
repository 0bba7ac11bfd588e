"""A small model with random weights on a CUDA device (`make test-gpu`, and a part of `make gpu-proof`).

Bit-equality there is for `amusd doctor` to measure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from passes import forward

from amusd.checkpoints.building import load_model
from amusd.checkpoints.checkpoint import write_checkpoint
from amusd.checkpoints.configuration import ModelConfig
from amusd.checkpoints.synthetic import SHAPES, random_weights
from amusd.config import Distribution
from amusd.models.numerics import Numerics
from amusd.models.passes import Paths, Rows
from amusd.runner.graphs import graph_capture, run_each_time
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner, extend
from amusd.sampling.ranking import Ranking
from amusd.sampling.sampler import SamplingState, SequenceSampler

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SMALLER = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 3}
TOKENS = [1, 4093, 198, 28120, 314, 260, 6376, 4461, 47, 2, 198, 1, 520, 9531, 198]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoint")
    settings = SHAPES["smollm2-135m-slice"] | SMALLER
    weights = random_weights(ModelConfig(**settings), dtype=torch.float32, device="cpu", seed=1)
    write_checkpoint(made, settings, weights)
    return made


def load(
    folder: Path, device: str, *, fixed: bool, graphs: bool = False, dtype: str = "float32", model_impl: str = "auto"
) -> ModelRunner:
    return load_model(
        folder,
        LoadOptions(
            numerics=Numerics.for_device(device, width=8, fixed=fixed),
            max_model_len=1024,
            dtype=dtype,
            device=device,
            model_impl=model_impl,
            capture=None if device == "cpu" else graph_capture(torch.device(device)) if graphs else run_each_time,
            tokens_per_step=4,
        ),
    )


@pytest.mark.parametrize("fixed", [True, False])
def test_the_device_computes_what_the_cpu_does(folder: Path, fixed: bool) -> None:
    logits = []
    for device in ("cpu", "cuda:0"):
        model = load(folder, device, fixed=fixed)
        cache = model.new_cache(64)
        model.prefill(TOKENS[:-5], cache)
        logits.append(forward(model, TOKENS[-5:], cache).logits.float().cpu())
    torch.testing.assert_close(logits[1], logits[0], atol=5e-2, rtol=1e-3)
    assert torch.equal(logits[1].argmax(-1), logits[0].argmax(-1))


@pytest.mark.parametrize("model_impl", ["amusd", "transformers"])
@pytest.mark.parametrize("fixed", [True, False])
def test_graphs_choose_what_passes_computed_anew_choose(folder: Path, fixed: bool, model_impl: str) -> None:
    chosen = []
    for graphs in (False, True):
        model = load(folder, "cuda:0", fixed=fixed, graphs=graphs, model_impl=model_impl)
        cache = model.new_cache(600)
        model.prefill(TOKENS[:-1], cache)
        tokens = extend(model, TOKENS[-1:], cache, 300)
        cache.truncate(len(TOKENS) + 40)
        chosen.append((tokens, forward(model, tokens[41:46], cache).choose()))
    assert chosen[0] == chosen[1]


@contextmanager
def nothing_asked_of_the_device() -> Iterator[None]:
    """An operation inside that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_prepared_model_chooses_without_asking_the_device(folder: Path) -> None:
    model = load(folder, "cuda:0", fixed=True, graphs=True, dtype="bfloat16")
    cache = model.new_cache(600)
    model.prepare(cache)
    model.prepare(cache, steps=model.tokens_per_step)
    model.prefill(TOKENS[:-5], cache)
    forward(model, TOKENS[-5:], cache).choose()
    with nothing_asked_of_the_device():
        forward(model, [7, 8, 9], cache).choose()
        cache.truncate(len(TOKENS))
        extend(model, [7], cache, 9)
        cache.truncate(len(TOKENS))
        forward(model, [9, 5, 6, 7], cache, parents=[0, 0, 2]).choose()
        model.keep([0, 2, 3], cache)
        forward(model, [9], cache).choose()


@pytest.mark.parametrize("model_impl", ["amusd", "transformers"])
def test_paths_and_trees_of_graphs_choose_what_passes_computed_anew_choose(folder: Path, model_impl: str) -> None:
    chosen = []
    for graphs in (False, True):
        model = load(folder, "cuda:0", fixed=False, graphs=graphs, model_impl=model_impl)
        cache = model.new_cache(600, spare=64)
        if graphs:
            model.prepare(cache)
        model.prefill(TOKENS[:-1], cache)
        tokens = [TOKENS[-1]]
        for _ in range(280):  # past the first split of keys
            wrong = (tokens[-1] + 1) % model.num_ids
            rows = [tokens[-1], wrong, forward(model, tokens[-1:], cache).choose()[0]]
            cache.truncate(cache.length - 1)
            found = forward(model, rows, cache, parents=[0, 0]).choose()
            assert found[0] == rows[2]
            model.keep([0, 2], cache)
            tokens += [rows[2], found[2]]
        logits = model.run([Rows([7, 8], cache, paths=Paths(np.arange(len(TOKENS)), [[630], [629]]))])[0].logits
        chosen.append((tokens, logits.argmax(-1).tolist()))
        cache.truncate(0)
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0])
def test_tokens_are_drawn_from_logits_on_the_device_as_from_their_copies(temperature: float) -> None:
    logits = torch.randn((64, 128_256), generator=torch.Generator().manual_seed(3)).mul_(3).bfloat16()
    distribution = Distribution(temperature=temperature, seed=11)
    chosen = []
    for device in ("cpu", "cuda:0"):
        sampler = SequenceSampler(distribution, SamplingState(logits.shape[1], device=device))
        packed = torch.from_numpy(sampler.inputs(40, [0] * 64)).to(device)
        chosen.append(sampler.sampler.compute(logits.to(device), packed)[0].tolist())
    assert chosen[0] == chosen[1]
    mixtures = [[(row, 0.5, 0.3), (logits.shape[1] + row, -0.2, 0.6)] if row % 2 else [] for row in range(8)]
    ranked = []
    for device in ("cpu", "cuda:0"):
        ranking = Ranking(distribution, SamplingState(logits.shape[1], device=device), number=8)
        packed = ranking.inputs_after(5, [[0] * (row // 2) for row in range(8)], mixtures)
        ranked.append(ranking.rank(logits[:8].to(device), packed, mixtures))
    for here, there in zip(*ranked, strict=True):
        assert [token_id for token_id, _ in here] == [token_id for token_id, _ in there]
        assert [one for _, one in here] == pytest.approx([one for _, one in there], rel=1e-4)
