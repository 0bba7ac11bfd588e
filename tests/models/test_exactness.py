"""The real embedded target: whatever the blocks, a fixed width gives the bits of plain decoding (tier E)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from models.blocks import decode_in_blocks
from models.paths import decode_in_paths
from torch import Tensor

from amusd.models.cached_model import CachedModel
from amusd.models.huggingface import load_model
from amusd.models.kv_cache import PreallocatedCache
from amusd.models.linear import fastest_dtype
from amusd.models.load_options import LoadOptions
from amusd.models.numerics import Numerics
from amusd.models.split_attention import prefix_of
from amusd.models.tokenizer import load_tokenizer, user_turn

pytestmark = pytest.mark.embedded

WIDTH = 8
NUM_TOKENS = 100
FASTEST = fastest_dtype(torch.device("cpu"))
"""The dtype that `target.dtype=auto` means here."""
FORWARD_PASSES = sorted({("amusd", FASTEST), ("transformers", FASTEST), ("amusd", "float32")})
"""`model_impl` and dtype."""


@dataclass(frozen=True)
class Plain:
    """Greedy decoding behind a prompt, one token a pass, at a fixed width."""

    model: CachedModel
    prompt: list[int]
    tokens: list[int]
    logits: Tensor
    """[tokens, vocab]: those that chose the tokens."""
    cache: PreallocatedCache
    """What it was decoded in."""

    def cache_of_prompt(self) -> PreallocatedCache:
        """That cache, with the prompt without its last token; wrong keys and values lie behind it."""
        length = len(self.prompt) - 1
        self.cache.truncate(length)
        self.model.prefill([5] * len(self.tokens), self.cache)
        self.cache.truncate(length)
        return self.cache

    def differing(self, rows: Sequence[Tensor] | Tensor) -> list[int]:
        """The indices of rows whose bits are others."""
        return [row for row, expected in enumerate(self.logits) if not torch.equal(rows[row], expected)]

    def decoded_in_blocks(self, seed: int) -> Tensor:
        """The same positions from ragged blocks; wrong candidates fill most of them up and are rolled back."""
        return decode_in_blocks(self.model, [*self.prompt, *self.tokens[:-1]], self.cache_of_prompt(), seed)


@pytest.fixture(scope="module")
def prompt(embedded_folder: Path) -> list[int]:
    return load_tokenizer(embedded_folder).encode_chat(user_turn("Why is the sky blue?"))


@pytest.fixture(scope="module", params=FORWARD_PASSES, ids=["-".join(names) for names in FORWARD_PASSES])
def plain(request: pytest.FixtureRequest, embedded_folder: Path, prompt: list[int]) -> Plain:
    model_impl, dtype = request.param
    numerics = Numerics(width=WIDTH, fixed=True)
    model = load_model(
        embedded_folder, LoadOptions(numerics=numerics, max_model_len=512, dtype=dtype, model_impl=model_impl)
    )
    assert model.implementation == model_impl
    return decode_plainly(model, prompt, NUM_TOKENS)


def decode_plainly(model: CachedModel, prompt: list[int], num_tokens: int) -> Plain:
    cache = model.new_cache(len(prompt) + num_tokens + model.width)
    model.prefill(prompt[:-1], cache)
    tokens, rows = [prompt[-1]], []
    for _ in range(num_tokens):
        rows.append(model.forward(tokens[-1:], cache).logits)
        tokens.append(int(rows[-1].argmax()))
    return Plain(model, prompt, tokens[1:], torch.cat(rows), cache)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_at_a_fixed_width_ragged_blocks_give_the_bits_of_plain_decoding(
    plain: Plain, prompt: list[int], seed: int
) -> None:
    border = Numerics(width=WIDTH, fixed=True).border
    assert (len(prompt) + NUM_TOKENS) // border > len(prompt) // border, "no border was crossed"
    assert plain.differing(plain.decoded_in_blocks(seed)) == []


def test_a_used_cache_gives_the_bits_of_a_fresh_one(plain: Plain, prompt: list[int]) -> None:
    model = plain.model
    fresh, used = model.new_cache(200), model.new_cache(200)
    model.prefill(list(range(100, 290)), used)
    used.truncate(0)
    for cache in (fresh, used):
        model.prefill(prompt, cache)
    assert torch.equal(model.forward([5, 6], used).logits, model.forward([5, 6], fresh).logits)


def test_the_embedded_target_answers_sensibly(plain: Plain, embedded_folder: Path) -> None:
    text = load_tokenizer(embedded_folder).decode(plain.tokens)
    assert "light" in text
    assert "\ufffd" not in text


@pytest.mark.parametrize("model_impl", ["amusd", "transformers"])
def test_without_the_fixed_width_the_bits_do_differ(embedded_folder: Path, prompt: list[int], model_impl: str) -> None:
    numerics = Numerics(width=WIDTH, fixed=False)
    model = load_model(
        embedded_folder, LoadOptions(numerics=numerics, max_model_len=512, dtype=FASTEST, model_impl=model_impl)
    )
    plain = decode_plainly(model, prompt, 40)
    largest = (plain.decoded_in_blocks(seed=0).float() - plain.logits.float()).abs().max().item()
    assert largest < 3, "more than rounding"
    if largest == 0:
        pytest.skip("on this machine every width gives the same bits: the fixed width has nothing to repair")


@pytest.mark.parametrize("num_filled", [340, 1100])
def test_a_pass_over_several_paths_gives_the_bits_of_plain_decoding(
    embedded_folder: Path, prompt: list[int], num_filled: int
) -> None:
    """Over borders of keys and of blocks of keys, and with the rows of the right path in any track."""
    numerics = Numerics.for_device("cpu", width=WIDTH, fixed=True)
    model = load_model(embedded_folder, LoadOptions(numerics=numerics, max_model_len=2048, dtype=FASTEST))
    plain = decode_plainly(model, filled_up(prompt, num_filled), NUM_TOKENS)
    tokens, cache = [*plain.prompt, *plain.tokens[:-1]], plain.cache_of_prompt()
    assert plain.differing(decode_in_paths(model, tokens, num_filled - 1, seed=num_filled, cache=cache)) == []


@pytest.mark.parametrize("model_impl", ["amusd", "transformers"])
def test_behind_a_long_prompt_ragged_blocks_give_the_bits_of_plain_decoding(
    embedded_folder: Path, prompt: list[int], model_impl: str
) -> None:
    """Where attention computes most keys in products of their own."""
    numerics = Numerics.for_device("cpu", width=WIDTH, fixed=True)
    model = load_model(
        embedded_folder, LoadOptions(numerics=numerics, max_model_len=4096, dtype=FASTEST, model_impl=model_impl)
    )
    plain = decode_plainly(model, filled_up(prompt, 1490), 60)
    assert plain.differing(plain.decoded_in_blocks(seed=2)) == []
    assert prefix_of(1490, WIDTH, torch.bfloat16) < prefix_of(1550, WIDTH, torch.bfloat16), "no border was crossed"


def filled_up(prompt: list[int], num_tokens: int) -> list[int]:
    """The prompt behind so many other tokens that there are `num_tokens`."""
    return [*(1000 + 7 * number % 4000 for number in range(num_tokens - len(prompt))), *prompt]
