"""Graphs are captured when a worker starts: few, and none amid an answer, whatever the answer needs."""

from __future__ import annotations

from typing import Any

import pytest
from fake_cuda import builders
from fake_cuda.device import fake_cuda
from fake_cuda.gpus import FakeGpus
from fake_cuda.workers import Target, TreeDraft

from amusd.config import GREEDY, Distribution, DrafterConfig, EngineConfig, HardwareConfig
from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.factory import load_drafters
from amusd.models.cached_model import CachedModel
from amusd.models.loading import DRAFT_ROWS, load_target
from amusd.models.row_attention import num_splits
from amusd.runtime.draft_worker import DraftWorker
from amusd.tracing.recorder import Recorder

MAX_GRAPHS = 16
"""Of one worker."""
MAX_BYTES = 10**9
"""Of the graphs of one worker."""
CUBLAS_WORKSPACE = 32 * 2**20
"""Of one stream, on Hopper."""
LENGTH = 512
"""Longest sequence of the small models."""

DISTRIBUTIONS = {
    "greedy": GREEDY,
    "temperature": Distribution(temperature=0.7, seed=3),
    "filters": Distribution(temperature=0.7, top_p=0.9, top_k=50, seed=3),
    "penalty": Distribution(repetition_penalty=1.2),
    "ratio test": Distribution(temperature=0.7, acceptance="rejection", seed=3),
}


def prompt_of(length: int) -> list[int]:
    return [(7 * place * place + 3) % 4000 for place in range(length)]


@pytest.fixture(params=DISTRIBUTIONS)
def distribution(request: pytest.FixtureRequest) -> Distribution:
    return DISTRIBUTIONS[request.param]


def engine(max_model_len: int, **options: Any) -> EngineConfig:
    return EngineConfig(
        hardware=HardwareConfig(devices=("cuda:0", "cuda:1"), synthetic="llama-8b"),
        drafters=(DrafterConfig(kind="synthetic", shape="llama-1b"),),
        max_model_len=max_model_len,
        **options,
    )


def num_graphs(gpus: FakeGpus) -> int:
    return len(gpus.graphs)


@pytest.mark.parametrize("max_model_len", [2048, 32_768])
@pytest.mark.parametrize("verify_width", ["fixed", "bucketed"])
def test_a_target_captures_few_graphs(max_model_len: int, verify_width: Any) -> None:
    with fake_cuda() as gpus, builders.two_layers():
        Target(load_target(engine(max_model_len, verify_width=verify_width), "cuda:0")[0])
    assert 1 <= num_graphs(gpus) <= MAX_GRAPHS


@pytest.mark.parametrize("max_model_len", [2048, 32_768])
def test_a_draft_worker_captures_few_graphs(max_model_len: int) -> None:
    with fake_cuda() as gpus, builders.two_layers():
        drafters = load_drafters(engine(max_model_len), "cuda:0")
        DraftWorker(
            link=None,  # type: ignore[arg-type]  # nothing is received here
            drafters=drafters.factories,
            incarnation=1,
            recorder=Recorder("draft"),
        ).prepare()
    assert 1 <= num_graphs(gpus) <= MAX_GRAPHS


@pytest.mark.parametrize("max_model_len", [2048, 32_768])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_graphs_reserve_little_memory(role: str, max_model_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By arithmetic: what captures leave, the most that one of them needs meanwhile, and what lies inside operators."""
    kept, most = 0, 0
    prepare = CachedModel.prepare

    def measured(self: CachedModel, *args: Any, **options: Any) -> None:
        nonlocal kept, most
        before = gpus.peak_bytes = gpus.live_bytes
        prepare(self, *args, **options)
        kept, most = kept + gpus.live_bytes - before, max(most, gpus.peak_bytes - before)

    with fake_cuda() as gpus:
        build = builders.target if role == "target" else builders.draft
        model = build("cuda:0", max_model_len=max_model_len)
        monkeypatch.setattr(CachedModel, "prepare", measured)
        if role == "target":
            Target(model)
        else:
            AutoregressiveDrafter(model)
            TreeDraft(model)
    heads, dim, rows = (32, 128, 8) if role == "target" else (32, 64, DRAFT_ROWS)
    partial_sums = rows * heads * num_splits(max_model_len) * (dim + 2) * 4  # of `attend_rows`, a layer at a time
    assert most > 0
    assert kept + most + partial_sums + CUBLAS_WORKSPACE < MAX_BYTES / 5


def test_graphs_of_a_worker_share_one_pool_and_one_stream() -> None:
    with fake_cuda() as gpus:
        Target(builders.target("cuda:0", fixed=False))
    assert len({id(graph.pool) for graph in gpus.graphs}) == 1
    assert len({graph.stream for graph in gpus.graphs}) == 1
    assert len({kernel.stream for kernel in gpus.record.kernels} - {gpus.graphs[0].stream}) <= 1  # the default stream


def test_other_threads_may_use_the_device_during_a_capture() -> None:
    with fake_cuda() as gpus:
        Target(builders.target("cuda:0"))
    assert {graph.mode for graph in gpus.graphs} == {"thread_local"}


def captured_by(work: Any, gpus: FakeGpus) -> int:
    with gpus.recorded() as part:
        work()
    assert part.replays
    return len(part.captures)


def test_no_chain_captures_amid_an_answer(distribution: Distribution) -> None:
    with fake_cuda(values=True) as gpus:
        drafter = AutoregressiveDrafter(builders.small("cuda:0", max_model_len=LENGTH, **builders.as_draft("cuda:0")))

        def answer() -> None:
            drafter.set_distribution(distribution)
            drafter.open(prompt_of(20), LENGTH)
            for number in (4, 1, 3, 8):
                drafter.propose(number)
                drafter.truncate(drafter.length - number + 1)
                drafter.commit([5] * number)
            drafter.commit([6] * 40)  # more than one pass takes in
            drafter.propose(4)
            drafter.open(prompt_of(245), LENGTH)
            for _ in range(4):  # across 256 positions
                drafter.propose(5)
            drafter.open(prompt_of(LENGTH - 10), LENGTH)
            while drafter.propose(4):
                pass

        assert captured_by(answer, gpus) == 0


@pytest.mark.parametrize("name", [name for name, chosen in DISTRIBUTIONS.items() if chosen.rule != "rejection"])
def test_no_tree_captures_amid_an_answer(name: str) -> None:
    with fake_cuda(values=True) as gpus:
        draft = TreeDraft(builders.small("cuda:0", max_model_len=LENGTH, **builders.as_draft("cuda:0")))

        def answer() -> None:
            draft.open(prompt_of(20), LENGTH, DISTRIBUTIONS[name])
            first = draft.step(1)
            for number in (3, 8, 16):
                draft.step(number)
            draft.adopt(first, [5, 6])
            draft.step(4)
            draft.adopt((), [6] * 40)
            draft.step(2)
            draft.open(prompt_of(250), LENGTH, DISTRIBUTIONS[name])
            for _ in range(4):
                draft.step(4)
            draft.open(prompt_of(LENGTH - 4), LENGTH, DISTRIBUTIONS[name])
            draft.step(2)

        assert captured_by(answer, gpus) == 0


@pytest.mark.parametrize("fixed", [True, False])
def test_no_target_captures_amid_an_answer(distribution: Distribution, fixed: bool) -> None:
    with fake_cuda(values=True) as gpus:
        target = Target(builders.small("cuda:0", fixed=fixed, max_model_len=LENGTH))
        alternatives = () if distribution.rule == "rejection" else (9, 10)

        def answer() -> None:
            for length in (20, 246, LENGTH - 26):
                target.open(prompt_of(length), distribution)
                for number in (0, 1, 3, 7, 5):
                    target.verify(prompt_of(number))
                    target.verify(prompt_of(max(1, number)), alternatives)
            while len(target.tokens) < LENGTH:
                target.verify(prompt_of(5))

        assert captured_by(answer, gpus) == 0
