"""An EAGLE drafter in a process of its own beside a target that writes its features: the tokens of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from models import tiny
from models.test_eagle import DRAFT_IDS, eagle3_weights, save_eagle3

from amusd.config import DecodingConfig, DrafterConfig, EngineConfig, SamplingParams, TargetConfig
from amusd.engine import Engine

VOCAB_SIZE, NUM_TOKENS = 300, 24
PROMPTS = [tuple((7 * place * place + number) % 250 + 3 for place in range(9 + number)) for number in range(4)]
PLAIN = DecodingConfig(mode="autoregressive")
SCHEDULES = {
    "chain of three": DecodingConfig(mode="synchronous", num_speculative_tokens=3, max_silence_seconds=60),
    "tree of two steps": DecodingConfig(
        mode="synchronous", num_speculative_tokens=2, tree=True, max_silence_seconds=60
    ),
    "branching": DecodingConfig(policy="branching", max_wait_passes=1e6, max_silence_seconds=60),
}
SAMPLING = {
    "greedy": SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True),
    "matching": SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.8, seed=4),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft") / "eagle"
    config = tiny.tiny_config(num_hidden_layers=6, tie_word_embeddings=False, vocab_size=VOCAB_SIZE)
    tiny.save_checkpoint(target, config, tiny.byte_tokenizer())
    t2d = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    t2d[DRAFT_IDS] = True
    save_eagle3(draft, eagle3_weights() | {"t2d": t2d}, vocab_size=VOCAB_SIZE)
    drafter = DrafterConfig(kind="eagle", model=str(draft))
    model = TargetConfig(kind="hf", model=str(target), dtype="float32")
    with Engine.start(EngineConfig(target=model, drafters=(drafter,), max_model_len=100, max_num_seqs=4)) as started:
        yield started


@pytest.mark.parametrize(
    ("schedule", "sampling"),
    [("chain of three", "greedy"), ("tree of two steps", "matching"), ("branching", "matching")],
)
def test_four_answers_at_a_time_have_the_tokens_of_plain_decoding(engine: Engine, schedule: str, sampling: str) -> None:
    params = SAMPLING[sampling]
    plain = engine.generate(PROMPTS, params, decoding=PLAIN)
    drafted = engine.generate(PROMPTS, params, decoding=SCHEDULES[schedule])
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    assert sum(answer.metrics.num_verified for answer in drafted) > 0
    assert not any(answer.metrics.num_draft_restarts for answer in drafted)
