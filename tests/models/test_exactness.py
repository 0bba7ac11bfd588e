"""The real embedded target: whatever the blocks, a fixed width gives the bits of plain decoding (tier E)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from amusd.models.cached_model import CachedModel
from amusd.models.huggingface import load_model
from amusd.models.numerics import Numerics
from amusd.models.tokenizer import load_tokenizer, user_turn

pytestmark = pytest.mark.embedded

WIDTH = 8
NUM_TOKENS = 150


@pytest.fixture(scope="module")
def prompt(embedded_folder: Path) -> list[int]:
    return load_tokenizer(embedded_folder).encode_chat(user_turn("Why is the sky blue?"))


@pytest.fixture(scope="module")
def fixed_model(embedded_folder: Path) -> CachedModel:
    return load_model(embedded_folder, numerics=Numerics(width=WIDTH, fixed=True), max_model_len=512)


def decode_plainly(model: CachedModel, prompt: list[int], num_tokens: int) -> tuple[list[int], Tensor]:
    """Greedy decoding, one token a pass: the tokens, and the logits [num_tokens, vocab] that chose them."""
    cache = model.new_cache(len(prompt) + num_tokens)
    model.prefill(prompt[:-1], cache)
    tokens, rows = [prompt[-1]], []
    for _ in range(num_tokens):
        rows.append(model.forward(tokens[-1:], cache).logits)
        tokens.append(int(rows[-1].argmax()))
    return tokens[1:], torch.cat(rows)


def decode_in_blocks(model: CachedModel, prompt: list[int], tokens: list[int], seed: int) -> Tensor:
    """The same positions from ragged blocks; wrong candidates fill most of them up and are rolled back."""
    rng = random.Random(seed)
    inputs = [prompt[-1], *tokens[:-1]]
    cache = model.new_cache(len(prompt) + len(tokens) + WIDTH)
    model.prefill(prompt[:-1], cache)
    rows: list[Tensor] = []
    done = num_rolled_back = 0
    while done < len(inputs):
        limit = model.max_rows(cache.length)
        num_right = rng.randint(1, min(limit, len(inputs) - done))
        num_wrong = rng.randint(0, limit - num_right)
        block = inputs[done : done + num_right] + [rng.randrange(model.vocab_size) for _ in range(num_wrong)]
        rows.append(model.forward(block, cache).logits[:num_right])
        done += num_right
        cache.truncate(len(prompt) - 1 + done)
        num_rolled_back += num_wrong
    assert num_rolled_back > 0
    return torch.cat(rows)


@pytest.fixture(scope="module")
def plain(fixed_model: CachedModel, prompt: list[int]) -> tuple[list[int], Tensor]:
    return decode_plainly(fixed_model, prompt, NUM_TOKENS)


@pytest.mark.parametrize("seed", [0, 1])
def test_at_a_fixed_width_ragged_blocks_give_the_bits_of_plain_decoding(
    fixed_model: CachedModel, prompt: list[int], plain: tuple[list[int], Tensor], seed: int
) -> None:
    tokens, expected = plain
    border = Numerics(width=WIDTH, fixed=True).border
    assert (len(prompt) + len(tokens)) // border > len(prompt) // border, "no border was crossed"
    rows = decode_in_blocks(fixed_model, prompt, tokens, seed)
    differing = [row for row in range(len(tokens)) if not torch.equal(rows[row], expected[row])]
    assert differing == []


def test_without_the_fixed_width_the_bits_do_differ(embedded_folder: Path, prompt: list[int]) -> None:
    model = load_model(embedded_folder, numerics=Numerics(width=WIDTH, fixed=False), max_model_len=512)
    tokens, expected = decode_plainly(model, prompt, 40)
    rows = decode_in_blocks(model, prompt, tokens, seed=0)
    largest = (rows.float() - expected.float()).abs().max().item()
    assert largest < 3, "more than rounding"
    if largest == 0:
        pytest.skip("on this machine every width gives the same bits: the fixed width has nothing to repair")


def test_a_used_cache_gives_the_bits_of_a_fresh_one(fixed_model: CachedModel, prompt: list[int]) -> None:
    fresh, used = fixed_model.new_cache(200), fixed_model.new_cache(200)
    fixed_model.prefill(list(range(100, 290)), used)
    used.truncate(0)
    for cache in (fresh, used):
        fixed_model.prefill(prompt, cache)
    assert torch.equal(fixed_model.forward([5, 6], used).logits, fixed_model.forward([5, 6], fresh).logits)


def test_the_embedded_target_answers_sensibly(plain: tuple[list[int], Tensor], embedded_folder: Path) -> None:
    text = load_tokenizer(embedded_folder).decode(plain[0])
    assert "light" in text
    assert "\ufffd" not in text
