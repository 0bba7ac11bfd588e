"""The real embedded target under `verify_width=fixed`: the same ids in every mode and timing (tier E).

The draft runs on a thread of its own over the memory link; `tests/launch` has the same pair in two processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import OracleDrafter
from runtime.pair import engine_of

from amusd.answer import Generation
from amusd.checkpoints.building import load_model
from amusd.checkpoints.embedded_draft import load_embedded_draft
from amusd.checkpoints.tokenizer import Tokenizer, load_tokenizer
from amusd.config import DecodingConfig, SamplingParams, WorkloadConfig
from amusd.drafters.base import Drafter
from amusd.drafters.model import ModelDrafter
from amusd.drafters.ngram import NgramCache, NgramDrafter
from amusd.drafters.synthetic import right_with_probability
from amusd.engine import Engine
from amusd.models.linear import fastest_dtype
from amusd.models.numerics import Numerics
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner
from amusd.types import Mode
from amusd.workload import load_prompts

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]

SPECULATIVE = ["synchronous", "asynchronous"]
WIDTH = 8
FASTEST = fastest_dtype(torch.device("cpu"))
OF_TARGET = LoadOptions(numerics=Numerics(width=WIDTH, fixed=True), max_model_len=512, dtype=FASTEST)
OF_DRAFT = LoadOptions(numerics=Numerics(width=16, fixed=False), max_model_len=512, dtype=FASTEST)


class UnevenOracle(OracleDrafter):
    num_proposals = 0

    def propose(self, path: Sequence[int], room: int) -> tuple[int, ...]:
        self.num_proposals += 1
        time.sleep(1.0 if self.num_proposals == 20 else 0.03 * (self.num_proposals % 4 == 0))
        return super().propose(path, room)


@pytest.fixture(scope="module")
def target(embedded_folder: Path) -> tuple[ModelRunner, Tokenizer]:
    model = load_model(embedded_folder, OF_TARGET)
    return model, load_tokenizer(embedded_folder)


@pytest.fixture(scope="module")
def draft(embedded_folder: Path) -> ModelRunner:
    return load_embedded_draft(embedded_folder, OF_DRAFT, vocab_size=8192)


def answer(
    engine: Engine, prompt: str | tuple[int, ...], num_tokens: int, mode: Mode, drafter: str | None, **settings: Any
) -> Generation:
    params = SamplingParams(max_new_tokens=num_tokens)
    decoding = DecodingConfig(mode=mode, num_speculative_tokens=5, max_silence_seconds=20.0, **settings)
    return engine.generate(prompt, params, decoding=decoding, drafter=drafter)


@pytest.mark.parametrize(("num_prompts", "num_tokens"), [(1, 24), pytest.param(16, 128, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
def test_the_modes_agree_on_real_prompts_in_uneven_timing(
    target: tuple[ModelRunner, Tokenizer], num_prompts: int, num_tokens: int
) -> None:
    """Plain decoding first; then every speculative mode, with a fast link and lookup, and with everything uneven."""
    num_accepted = 0
    for prompt in load_prompts(WorkloadConfig(num_prompts=num_prompts)):
        with engine_of(*target, {"ngram": NgramDrafter}) as (engine, _):
            encoded = engine.encode(prompt.text)
            plain = answer(engine, encoded, num_tokens, "autoregressive", None)
            for mode in SPECULATIVE:
                assert answer(engine, encoded, num_tokens, mode, "ngram").token_ids == plain.token_ids
        oracle = lambda ids: UnevenOracle(ids, right_with_probability(0.7, 5), 49_152)  # noqa: E731
        known = (*encoded, *plain.token_ids)
        with engine_of(*target, {"oracle": lambda: oracle(known)}, seed=3, max_delay_seconds=0.03) as (engine, _):  # noqa: B023
            for mode in SPECULATIVE:
                # a fast target may not wait otherwise
                result = answer(engine, encoded, num_tokens, mode, "oracle", policy="chain", max_wait_passes=1000.0)
                assert result.token_ids == plain.token_ids
                num_accepted += result.metrics.num_accepted
    # How many is a matter of timing; none at all would mean that nothing was tried.
    assert num_accepted > num_prompts


@pytest.mark.parametrize(
    "temperature", [0.7, *(pytest.param(other, marks=pytest.mark.long) for other in (0.0, 0.3, 1.0, 1.5))]
)
def test_sampled_answers_are_those_of_plain_decoding(
    target: tuple[ModelRunner, Tokenizer], draft: ModelRunner, temperature: float
) -> None:
    """Matching at a fixed width, with the trained draft and with lookup, over messages that come late."""
    drafters: dict[str, Callable[[], Drafter]] = {
        "embedded": lambda: ModelDrafter(draft, NgramCache(4)),
        "ngram": lambda: NgramDrafter(2),
    }
    filters = {"top_k": 40, "top_p": 0.95} if temperature in (0.7, 1.5) else {}
    params = SamplingParams(temperature=temperature, seed=17, max_new_tokens=20, **filters)
    prompt = "Name a city and a river."
    with engine_of(*target, drafters, seed=3, max_delay_seconds=0.01) as (engine, _):
        plain = engine.generate(prompt, params, decoding=DecodingConfig(mode="autoregressive"))
        for drafter, decoding in (
            ("embedded", DecodingConfig(mode="synchronous", max_silence_seconds=60.0)),
            ("embedded", DecodingConfig(policy="branching", max_wait_passes=1e6, max_silence_seconds=60.0)),
            ("ngram", DecodingConfig()),
        ):
            answer = engine.generate(prompt, params, decoding=decoding, drafter=drafter)
            assert answer.token_ids == plain.token_ids, (decoding, drafter)
            assert answer.metrics.num_refused == 0
            assert answer.metrics.num_accepted > 0 or drafter == "ngram"
