"""vLLM itself with the embedded pair: the texts of plain vLLM, one at a time and in a batch, whatever the draft does.

Needs an environment with vLLM (`make vllm`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from amusd.checkpoints.tokenizer import load_tokenizer
from amusd.runtime.cores import allowed_cores
from experiments.vllm.run import Vllm
from tests.launch.processes import ROOT, run

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
INSTALLED = ROOT / ".venv-vllm" / ".installed"
PROMPTS = [
    f"{ask} {what}?" for ask in ("Why is the sky", "Write a poem on") for what in ("blue", "high", "grey", "over us")
]
NUM_TOKENS = 24
KILLS = [2, 5, 4]
DISPATCH = """
from types import SimpleNamespace as Space
from unittest.mock import Mock
import numpy as np
from vllm.config.compilation import CompilationConfig, CompilationMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from amusd.integrations.vllm import AsyncProposer
for mode in ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "FULL", "PIECEWISE"):
    sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 40], "max_cudagraph_capture_size": 40}
    compilation = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=mode, **sizes)
    compilation.set_splitting_ops_for_v1("allgather_reducescatter")
    compilation.adjust_cudagraph_sizes_for_spec_decode(5)
    limits = Space(max_num_seqs=8)
    config = Space(compilation_config=compilation, num_speculative_tokens=4, lora_config=None, scheduler_config=limits)
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(compilation.cudagraph_mode, 5)
    proposer, settings = AsyncProposer.__new__(AsyncProposer), Space(draft_up_to_rows=3)
    proposer.compilation = compilation
    for found in ([[7], [], [8, 9]], [[]] * 4):
        proposer.batch = Mock(settings=settings, num_candidates=4, propose=lambda *_: found)
        rows = proposer.propose([[1]] * len(found), np.ones(4, np.int32), np.ones((4, 9), np.int32))
        lengths = [1 + len(row) for row in rows]
        is_uniform = GPUModelRunner._is_uniform_decode(max(lengths), 5, sum(lengths), len(rows))
        print(mode, dispatcher.dispatch(sum(lengths), uniform_decode=is_uniform)[0].name, sum(lengths))
"""
"""A program that prints which graph vLLM replays for a small and a large batch, and the rows of the pass."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.embedded,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not INSTALLED.exists(), reason="there is no environment with vLLM; `make vllm` makes one"),
]


def texts_of(
    vllm: Vllm, prompts: list[list[int]], batch_size: int, **more: Any
) -> tuple[list[list[int]], Counter[str]]:
    texts, counts = list[list[int]](), Counter[str]()
    for start in range(0, len(prompts), batch_size):
        asked = prompts[start : start + batch_size]
        reply = vllm.answer(asked, [NUM_TOKENS] * len(asked), **more)
        texts += reply["token_ids"]
        counts.update(reply["counts"])
    return texts, counts


@contextmanager
def running(target: Path, log: Path, **settings: Any) -> Iterator[Vllm]:
    llm = {"model": str(target), "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8}
    llm |= {"kv_cache_memory_bytes": 1 << 28, "enable_prefix_caching": False, **settings}
    with Vllm(PYTHON, {"llm": llm, "cores": allowed_cores()[:1]}, log) as vllm:
        yield vllm
    assert vllm.exit_code == 0, log.read_text()


@pytest.fixture(scope="module")
def prompts(embedded_folder: Path) -> list[list[int]]:
    encode = load_tokenizer(embedded_folder).encode
    return [[*encode(prompt)] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def plain(
    embedded_folder: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, list[list[int]]]:
    with running(embedded_folder, tmp_path_factory.mktemp("vllm") / "plain.log") as vllm:
        return {batch_size: texts_of(vllm, prompts, batch_size)[0] for batch_size in (1, 8)}


def test_vllm_replays_its_full_graphs_for_what_the_proposer_returns() -> None:
    done = run([str(PYTHON), "-c", DISPATCH], ROOT)
    assert done.stdout.splitlines() == [
        "FULL_AND_PIECEWISE FULL 15",
        "FULL_AND_PIECEWISE PIECEWISE 4",
        "FULL_DECODE_ONLY FULL 15",
        "FULL_DECODE_ONLY NONE 4",
        "FULL FULL 6",
        "FULL FULL 4",
        "PIECEWISE PIECEWISE 6",
        "PIECEWISE PIECEWISE 4",
    ], done.stderr


@pytest.mark.parametrize("wait_ms", [0, 50])
def test_vllm_gives_its_own_texts_with_a_draft_beside_it(
    embedded_folder: Path, prompts: list[list[int]], plain: dict[int, list[list[int]]], tmp_path: Path, wait_ms: int
) -> None:
    proposer = {"method": "custom_class", "model": "amusd.integrations.vllm.AsyncProposer", "num_speculative_tokens": 4}
    amusd = {"drafter": {"kind": "embedded"}, "cores": allowed_cores()[-1:], "wait_ms": wait_ms}
    own = {"speculative_config": proposer, "additional_config": {"amusd": amusd}}
    with running(embedded_folder, tmp_path / "vllm.log", **own) as vllm:
        for batch_size, expected in plain.items():
            texts, counts = texts_of(vllm, prompts, batch_size)
            assert texts == expected
            assert counts["losses"] == 0
            if wait_ms:
                assert counts["accepted"] > 0
        texts, counts = texts_of(vllm, prompts, 8, kills=KILLS)
        assert texts == plain[8]
        assert counts["losses"] > 0
        assert texts_of(vllm, prompts, 8)[0] == plain[8]
        texts, counts = texts_of(vllm, prompts, 8, pads=True)
        assert texts == plain[8]
        assert counts["accepted"] <= counts["proposed"]
        texts, counts = texts_of(vllm, prompts, 8, settings={"draft_up_to_rows": 7})
        assert texts == plain[8]
        assert counts["rows"] == 0
