"""The real embedded target at a fixed width: blocks, paths and neighbours change no bit of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from models.blocks import decode_in_blocks
from models.paths import decode_in_paths
from passes import forward, prefilled
from runner.test_batch import check_batches
from torch import Tensor

from amusd.checkpoints.building import load_model
from amusd.checkpoints.tokenizer import load_tokenizer, user_turn
from amusd.models.kv_cache import KVCache
from amusd.models.linear import fastest_dtype
from amusd.models.numerics import Numerics
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner

pytestmark = pytest.mark.embedded

WIDTH = 8
NUM_TOKENS = 24
FASTEST = fastest_dtype(torch.device("cpu"))
RULE = Numerics.for_device("cpu", width=WIDTH, fixed=True)


@dataclass(frozen=True)
class Plain:
    model: ModelRunner
    prompt: list[int]
    tokens: list[int]
    logits: Tensor
    """[tokens, vocab]: the logits that chose the tokens."""
    cache: KVCache

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt, *self.tokens[:-1]]

    def cache_of_prompt(self) -> KVCache:
        """Returns a cache of the prompt without its last token; wrong keys and values follow in memory."""
        length = len(self.prompt) - 1
        self.cache.truncate(length)
        self.model.prefill([5] * len(self.tokens), self.cache)
        self.cache.truncate(length)
        return self.cache

    def differing(self, rows: Sequence[Tensor] | Tensor) -> list[int]:
        return [row for row, expected in enumerate(self.logits) if not torch.equal(rows[row], expected)]


def load(folder: Path, model_impl: str = "amusd", numerics: Numerics = RULE, dtype: str = FASTEST) -> ModelRunner:
    model = load_model(folder, LoadOptions(numerics=numerics, max_model_len=2048, dtype=dtype, model_impl=model_impl))
    assert model.implementation == model_impl
    return model


def decode_plainly(model: ModelRunner, folder: Path, prompt_length: int, num_tokens: int) -> Plain:
    question = load_tokenizer(folder).encode_chat(user_turn("Why is the sky blue?"))
    prompt = [*(1000 + 7 * number % 4000 for number in range(prompt_length - len(question))), *question]
    cache = prefilled(model, prompt[:-1], len(prompt) + num_tokens + model.numerics.width)
    tokens, rows = [prompt[-1]], []
    for _ in range(num_tokens):
        rows.append(forward(model, tokens[-1:], cache).logits)
        tokens.append(int(rows[-1].argmax()))
    return Plain(model, prompt, tokens[1:], torch.cat(rows), cache)


@pytest.fixture(scope="module", params=["amusd", pytest.param("transformers", marks=pytest.mark.long)])
def plain(request: pytest.FixtureRequest, embedded_folder: Path) -> Plain:
    return decode_plainly(load(embedded_folder, request.param), embedded_folder, RULE.prefill_chunk - 12, NUM_TOKENS)


def test_ragged_blocks_and_paths_give_the_bits_of_plain_decoding(plain: Plain) -> None:
    start = len(plain.prompt) - 1
    assert plain.differing(decode_in_blocks(plain.model, plain.token_ids, plain.cache_of_prompt(), seed=0)) == []
    in_paths = decode_in_paths(plain.model, plain.token_ids, start, cache=plain.cache_of_prompt())
    assert plain.differing(in_paths) == []


@pytest.mark.parametrize("plain", ["amusd"], indirect=True)
def test_each_sequence_of_a_batch_has_the_bits_that_it_has_alone(plain: Plain) -> None:
    check_batches(plain.model, seed=0, number=3, num_passes=3)


@pytest.mark.parametrize("plain", ["amusd"], indirect=True)
def test_the_embedded_target_answers_sensibly(plain: Plain, embedded_folder: Path) -> None:
    text = load_tokenizer(embedded_folder).decode(plain.tokens)
    assert "light" in text
    assert "\ufffd" not in text


@pytest.mark.long
@pytest.mark.parametrize("model_impl", ["amusd", "transformers"])
def test_blocks_and_paths_after_a_long_prompt_give_the_bits_of_plain_decoding(
    embedded_folder: Path, model_impl: str
) -> None:
    test_ragged_blocks_and_paths_give_the_bits_of_plain_decoding(
        decode_plainly(load(embedded_folder, model_impl), embedded_folder, 1490, 60)
    )
