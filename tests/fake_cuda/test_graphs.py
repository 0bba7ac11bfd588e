"""Graphs are captured when a worker starts: few, and none amid an answer, whatever the answer needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from chains import propose
from fake_cuda import builders
from fake_cuda.device import fake_cuda
from fake_cuda.gpus import FakeGpus
from fake_cuda.workers import Target, TreeDraft

from amusd.checkpoints.loading import DRAFT_ROWS, load_target
from amusd.config import GREEDY, Distribution, DrafterConfig, EngineConfig, HardwareConfig
from amusd.drafters.factory import load_drafters
from amusd.drafters.model import ModelDrafter
from amusd.models.passes import Rows
from amusd.models.row_attention import num_splits
from amusd.runner.model_runner import ModelRunner
from amusd.runtime.verifier import prepare_to_verify

MAX_GRAPHS = 24
MAX_BYTES = 10**9
CUBLAS_WORKSPACE = 32 * 2**20
LENGTH = 256
FILTERS = Distribution(temperature=0.7, top_p=0.9, top_k=50, seed=3)


def prompt_of(length: int) -> list[int]:
    return [(7 * place * place + 3) % 4000 for place in range(length)]


def engine(max_model_len: int, **options: Any) -> EngineConfig:
    return EngineConfig(
        hardware=HardwareConfig(devices=("cuda:0", "cuda:1"), synthetic="llama-8b"),
        drafters=(DrafterConfig(kind="synthetic", shape="llama-1b"),),
        max_model_len=max_model_len,
        **options,
    )


@pytest.mark.parametrize("verify_width", ["fixed", "bucketed"])
def test_workers_capture_few_graphs_in_one_pool_and_leave_other_threads_alone(verify_width: Any) -> None:
    with fake_cuda() as gpus, builders.two_layers():
        Target(load_target(engine(2048, verify_width=verify_width), "cuda:0")[0])
        graphs = gpus.record.captures
        for make in load_drafters(engine(32_768), "cuda:1").factories.values():
            make(1)
    drafted = gpus.record.captures[len(graphs) :]
    assert 1 <= len(graphs) <= MAX_GRAPHS
    assert 1 <= len(drafted) <= MAX_GRAPHS
    for part in (graphs, drafted):
        assert len({id(graph.pool) for graph in part}) == 1
        assert len({graph.stream for graph in part}) == 1
        assert {graph.mode for graph in part} == {"thread_local"}


@pytest.mark.parametrize("role", ["target", "draft"])
def test_graphs_reserve_little_memory(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds up the memory that captures keep, the most that one needs meanwhile, and the operators' own workspace."""
    kept, most, max_model_len = 0, 0, 32_768
    prepare = ModelRunner.prepare

    def measured(self: ModelRunner, *args: Any, **options: Any) -> None:
        nonlocal kept, most
        before = gpus.peak_bytes = gpus.live_bytes
        prepare(self, *args, **options)
        kept, most = kept + gpus.live_bytes - before, max(most, gpus.peak_bytes - before)

    with fake_cuda() as gpus:
        build = builders.target if role == "target" else builders.draft
        model = build("cuda:0", max_model_len=max_model_len)
        monkeypatch.setattr(ModelRunner, "prepare", measured)
        if role == "target":
            Target(model)
        else:
            ModelDrafter(model)
            TreeDraft(model)
    heads, dim, rows = (32, 128, 8) if role == "target" else (32, 64, DRAFT_ROWS)
    partial_sums = rows * heads * num_splits(max_model_len) * (dim + 2) * 4  # of `attend_rows`, a layer at a time
    assert most > 0
    assert kept + most + partial_sums + CUBLAS_WORKSPACE < MAX_BYTES / 4


def test_trees_and_paths_of_a_worker_stay_on_its_own_device() -> None:
    with fake_cuda() as gpus:
        draft, target = TreeDraft(builders.draft("cuda:1")), Target(builders.target("cuda:1", fixed=False))
        draft.open(prompt_of(10), 64)
        draft.step(2)
        target.open(prompt_of(10))
        target.verify([1, 2, 3], [4, 5])
    assert gpus.record.devices == {1}
    assert gpus.record.replays
    assert gpus.record.waits


@contextmanager
def nothing_captured(gpus: FakeGpus) -> Iterator[None]:
    with gpus.recorded() as part:
        yield
    assert part.replays
    assert not part.captures


def small_draft() -> ModelRunner:
    return builders.small("cuda:0", max_model_len=LENGTH, **builders.as_draft("cuda:0"))


@pytest.mark.parametrize("fixed", [False, True])
def test_no_pass_of_a_target_captures_amid_an_answer(fixed: bool) -> None:
    with fake_cuda(values=True) as gpus:
        target = Target(builders.small("cuda:0", max_model_len=LENGTH, fixed=fixed))
        with nothing_captured(gpus):
            for length, distribution in ((20, GREEDY), (LENGTH - 20, FILTERS)):
                target.open(prompt_of(length), distribution)
                for number in (0, 1, 3, 7):
                    target.verify([5] * number)
                target.verify([1, 2, 3], [4, 5])


def test_no_chain_captures_amid_an_answer() -> None:
    with fake_cuda(values=True) as gpus:
        drafter = ModelDrafter(small_draft())
        with nothing_captured(gpus):
            drafter.set_distribution(FILTERS)
            drafter.open(prompt_of(20), LENGTH)
            for number in (4, 1, 3, 8):
                drafter.commit([*propose(drafter, number)[:1], *[5] * number])
            drafter.commit([6] * 40)  # more than one pass takes in
            drafter.open(prompt_of(LENGTH - 10), LENGTH)
            propose(drafter, 10)


def test_no_tree_captures_amid_an_answer() -> None:
    with fake_cuda(values=True) as gpus:
        draft = TreeDraft(small_draft())
        with nothing_captured(gpus):
            draft.open(prompt_of(20), LENGTH, Distribution(repetition_penalty=1.2))
            first = draft.step(1)
            for number in (3, 8, 16):
                draft.step(number)
            draft.adopt(first, [5, 6])
            draft.step(4)
            draft.adopt((), [6] * 40)
            draft.step(2)
            draft.open(prompt_of(LENGTH - 4), LENGTH, GREEDY)
            draft.step(2)


@pytest.mark.parametrize(("role", "num_graphs"), [("target", 2 * 5), ("draft", 2 * (7 * 2 + 3 * 3))])
def test_eight_sequences_share_their_logits_and_one_alone_is_sampled_alone(role: str, num_graphs: int) -> None:
    """Samplers cost more than the products where vocabularies are large, so none runs over rows of no sequence."""
    with fake_cuda() as gpus:
        model = builders.target("cuda:0") if role == "target" else builders.draft("cuda:0")
        caches = model.new_caches(8, 256)
        before = gpus.live_bytes
        if role == "target":
            prepare_to_verify(model, caches[0])
        else:
            kept = [ModelDrafter(model, cache=cache) for cache in caches]
            assert kept
        logits = 8 * model.numerics.width * model.vocab_size * torch.bfloat16.itemsize
        assert logits <= gpus.live_bytes - before < 1.5 * logits + 2**20
        assert len(gpus.record.captures) == num_graphs
        sampled = []
        for number in (1, 8):
            with gpus.recorded() as part:
                model.run([Rows([5], cache) for cache in caches[:number]])
            sampled += [kernel.operands[0].shape[0] for kernel in part.kernels if kernel.name == "max"]
    assert sampled == ([8, 64] if role == "target" else [1, 8])
