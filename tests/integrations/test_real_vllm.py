"""vLLM itself with the embedded pair: the texts of plain vLLM, one at a time and in a batch, whatever the draft does.

Needs an environment with vLLM (`make vllm`).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from amusd.models.tokenizer import load_tokenizer
from amusd.runtime.cores import allowed_cores
from tests.launch.processes import ROOT

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
INSTALLED = ROOT / ".venv-vllm" / ".installed"
PROMPTS = [
    f"{ask} {what}?" for ask in ("Why is the sky", "Write a poem on") for what in ("blue", "high", "grey", "over us")
]
NUM_TOKENS = 24
KILLS = [2, 5, 4]

pytestmark = [
    pytest.mark.long,
    pytest.mark.embedded,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not INSTALLED.exists(), reason="there is no environment with vLLM; `make vllm` makes one"),
]


class Vllm:
    """One engine of `experiments/vllm/engine.py`."""

    def __init__(self, process: subprocess.Popen[str], prompts: list[list[int]]) -> None:
        self._process, self._prompts = process, prompts

    def answer(self, batch_size: int, kills: list[int] | None = None) -> tuple[list[list[int]], dict[str, int]]:
        texts, counts = list[list[int]](), dict[str, int]()
        for start in range(0, len(self._prompts), batch_size):
            prompts = self._prompts[start : start + batch_size]
            reply = self._ask({"prompts": prompts, "num_tokens": NUM_TOKENS, "kills": kills or []})
            texts += reply["token_ids"]
            counts = {name: counts.get(name, 0) + value for name, value in reply["counts"].items()}
        return texts, counts

    def _ask(self, order: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def running(target: Path, **settings: Any) -> Iterator[Vllm]:
    llm = {"model": str(target), "dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8}
    llm |= {"kv_cache_memory_bytes": 1 << 28, "enable_prefix_caching": False, **settings}
    command = [str(PYTHON), str(ROOT / "experiments" / "vllm" / "engine.py")]
    command.append(json.dumps({"llm": llm, "cores": allowed_cores()[:1]}))
    encode = load_tokenizer(target).encode
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "{}\n"
        yield Vllm(process, [[*encode(prompt)] for prompt in PROMPTS])
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0


@pytest.fixture(scope="module")
def plain(embedded_folder: Path) -> dict[int, list[list[int]]]:
    with running(embedded_folder) as vllm:
        return {batch_size: vllm.answer(batch_size)[0] for batch_size in (1, 8)}


@pytest.mark.parametrize("wait_ms", [0, 50])
def test_vllm_gives_its_own_texts_with_a_draft_beside_it(
    embedded_folder: Path, plain: dict[int, list[list[int]]], wait_ms: int
) -> None:
    proposer = {"method": "custom_class", "model": "amusd.integrations.vllm.AsyncProposer", "num_speculative_tokens": 4}
    amusd = {"drafter": {"kind": "embedded"}, "cores": allowed_cores()[-1:], "wait_ms": wait_ms}
    with running(embedded_folder, speculative_config=proposer, additional_config={"amusd": amusd}) as vllm:
        for batch_size, expected in plain.items():
            texts, counts = vllm.answer(batch_size)
            assert texts == expected
            assert counts["losses"] == 0
            if wait_ms:
                assert counts["accepted"] > 0
        texts, counts = vllm.answer(8, KILLS)
        assert texts == plain[8]
        assert counts["losses"] > 0
        assert vllm.answer(8)[0] == plain[8]
