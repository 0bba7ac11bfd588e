"""A kernel or graph that fails or errs on a GPU is left out with one line; the tokens are those of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fake_cuda import builders
from fake_cuda.device import fake_cuda
from fake_cuda.gpus import FakeGpus

from amusd.errors import ConfigError
from amusd.models.fused import silu_and_multiply
from amusd.models.row_attention import attend_rows
from amusd.models.sharding import Ranks
from amusd.runner import captured, graphs
from amusd.runner.fallback import find_way
from amusd.runner.model_runner import ModelRunner, extend
from amusd.sampling.operators import Triton

PROMPT = [(7 * place) % 4000 for place in range(20)]


class OutOfResources(Exception):  # noqa: N818 - Triton's name; no RuntimeError
    pass


@pytest.fixture(autouse=True)
def ended_pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Pools into which nothing is allocated any more."""
    pools: list[object] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda _device, pool: pools.append(pool))
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda _device, pool: pools.append(pool))
    monkeypatch.setattr(Triton, "is_used", True)
    yield pools
    torch.backends.cuda.enable_flash_sdp(enabled=True)
    torch.backends.cuda.enable_mem_efficient_sdp(enabled=True)


def answer(model: ModelRunner) -> list[int]:
    cache = model.new_cache(100)
    model.prepare(cache)
    model.prefill(PROMPT[:-1], cache)
    return extend(model, PROMPT[-1:], cache, 8)


def wrong_attention(query: Any, keys: Any, values: Any, *where: Any) -> Any:
    return attend_rows(query, keys, values.roll(1, -1), *where)


def wrong_noise(logits: Any, *_: Any) -> Any:
    return logits + 1.0


def raises(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def not_replayed(gpus: FakeGpus) -> None:
    torch.cuda.CUDAGraph.replay = lambda _graph: None  # type: ignore[method-assign]


def not_captured(gpus: FakeGpus) -> None:
    """A capture fails halfway, under torch's own context manager: ending it raises, too, and leaves its stream."""
    capturing: list[object] = []

    class LostGraph:
        def capture_begin(self, *_: Any, **__: Any) -> None:
            capturing.append(self)

        def capture_end(self) -> None:
            capturing.clear()
            raise RuntimeError("operation failed due to a previous error during capture")

    def silu(gate_up: Any) -> Any:
        if capturing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return silu_and_multiply(gate_up)

    gpus.kernels["silu_and_multiply"] = silu
    torch.cuda.CUDAGraph, torch.cuda.graph = LostGraph, torch.cuda.graphs.graph  # type: ignore[misc,assignment]


def kernel(name: str, double: Callable[..., Any]) -> Callable[[FakeGpus], None]:
    return lambda gpus: gpus.kernels.update({name: double})


@pytest.mark.parametrize(
    ("defect", "line", "has_graphs"),
    [
        (lambda _gpus: None, "", True),
        (kernel("attend_rows", wrong_attention), "CUDA graphs, Triton, which is slower: results differ from ", False),
        (kernel("noisy_scores", wrong_noise), "CUDA graphs, Triton, which is slower: results differ from ", False),
        (
            kernel("attend_rows", raises(OutOfResources("out of resource: shared memory"))),
            "CUDA graphs, Triton, which is slower: OutOfResources: out of resource: shared memory",
            False,
        ),
        (
            kernel("silu_and_multiply", raises(ModuleNotFoundError("No module named 'triton'"))),
            "Triton, which is slower: ModuleNotFoundError: No module named 'triton'; pip install 'amusd[gpu]' brings",
            True,
        ),
        (not_replayed, "CUDA graphs, which is slower: results differ from ", False),
        (not_captured, "CUDA graphs, which is slower: a pass on cuda:0 cannot be captured: CUDA out of memory", False),
    ],
    ids=["nothing", "wrong kernel", "wrong noise", "out of resources", "no Triton", "wrong graph", "capture"],
)
def test_what_fails_or_differs_is_left_out_with_one_line(
    defect: Callable[[FakeGpus], None],
    line: str,
    has_graphs: bool,
    ended_pools: list[object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = answer(builders.small("cpu"))
    with fake_cuda(values=True) as gpus:
        defect(gpus)
        model = builders.small("cuda:0")
        assert answer(model) == expected
        assert gpus.current_streams[0].number == 0, "another stream stays the current one"
    assert [record.getMessage().startswith(f"cuda:0 computes without {line}") for record in caplog.records] == (
        [True] if line else []
    )
    assert (model.capture is not graphs.run_each_time) == has_graphs
    assert len(ended_pools) == 2 * (defect is not_captured)


def test_fused_attention_of_prompts_is_compared_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = captured.causal_attention

    def wrong(*where: int) -> Any:
        scale = 2.0 if torch.backends.cuda.flash_sdp_enabled() else 1.0
        return lambda layer: attend(*where)(layer._replace(scaling=scale * layer.scaling))

    monkeypatch.setattr(captured, "causal_attention", wrong)
    with fake_cuda(values=True):
        model = builders.small("cuda:0")
        way = find_way(model, model.new_cache(100))
    assert len(caplog.records) == 1
    assert "without CUDA graphs, Triton, fused attention of prompts, which" in caplog.text
    assert way.startswith(
        "computed without CUDA graphs, Triton, fused attention of prompts; results differ from those "
    )
    assert way.endswith(" by 0 standard deviations")
    assert not torch.backends.cuda.flash_sdp_enabled()


def test_damaged_weights_are_no_defect_of_a_kernel(caplog: pytest.LogCaptureFixture) -> None:
    with fake_cuda(values=True):
        model = builders.small("cuda:0")
        model.network.embedding.fill_(torch.nan)  # type: ignore[attr-defined]
        find_way(model, model.new_cache(100))
    assert not caplog.records


def test_ranks_capture_all_or_none() -> None:
    with fake_cuda(values=True) as gpus:
        not_captured(gpus)
        model = builders.small("cuda:0")
        model.ranks = Ranks(0, 2)
        with pytest.raises(
            ConfigError, match=r"^hardware.cuda_graphs=true: a pass on cuda:0 cannot .*; allowed here: false$"
        ):
            model.prepare(model.new_cache(100))
