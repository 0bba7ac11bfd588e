"""Shared by the tests of forward passes: token ids, a sampler, the reference, decoding in blocks with rollbacks."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import torch
from models import tiny
from passes import forward
from torch import Tensor

from amusd.models.kv_cache import KVCache
from amusd.models.numerics import Numerics
from amusd.models.passes import SamplerRows
from amusd.runner.model_runner import ModelRunner

FIXED = Numerics(width=8, fixed=True, prefill_chunk=32)
BUCKETED = Numerics(width=8, fixed=False, prefill_chunk=32)
UNLIKE = ["LlamaConfig", "Gemma2Config", "Gemma4TextConfig", "GPT2Config", "GptOssConfig"]
UNLIKE += ["DeepseekV3Config", "Llama4TextConfig"]
"""Architectures whose attention differs."""


@functools.lru_cache
def bucketed_model(name: str = "LlamaConfig") -> ModelRunner:
    return tiny.wrapped_pair(name, BUCKETED)[1]


def random_ids(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, tiny.VOCAB) for _ in range(length)]


class Second:
    """A `Sampler` that chooses the second best column where a row asks for it; its output is a number by its level."""

    num_outputs = 1
    neutral = np.array([0, 5])

    def __init__(self, level: int) -> None:
        self.level = level

    def wanted(self, num_rows: int) -> SamplerRows:
        return SamplerRows(self, np.tile([1, 5 + 2 * self.level], (num_rows, 1)))

    def compute(self, logits: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        best = logits.topk(2, dim=1).indices
        return torch.where(inputs[:, 0] > 0, best[:, 1], best[:, 0]), inputs[:, -1:].int()


def stock_logits(model: Any, token_ids: list[int]) -> Tensor:
    """[rows, vocab] of a transformers model, in one pass without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0]


def check_logits(found: Tensor, expected: Tensor, *, tolerance: float = 1e-4, least_std: float = 0.05) -> None:
    assert expected.std() > least_std, "the weights are too small for this test to see anything"
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def decode_in_blocks(model: ModelRunner, token_ids: list[int], cache: KVCache, seed: int = 1) -> Tensor:
    """Logits of the rest of `token_ids` from ragged blocks, most with wrong candidates that are rolled back."""
    rng = random.Random(seed)
    rows: list[Tensor] = []
    num_rolled_back = 0
    while cache.length < len(token_ids):
        start = cache.length
        num_right = rng.randint(1, min(model.numerics.max_rows(start), len(token_ids) - start))
        num_wrong = rng.randint(0, min(model.numerics.max_rows(start) - num_right, cache.capacity - start - num_right))
        block = token_ids[start : start + num_right] + [rng.randrange(model.vocab_size) for _ in range(num_wrong)]
        rows.append(forward(model, block, cache).logits[:num_right].clone())  # valid until the next pass
        cache.truncate(start + num_right)
        num_rolled_back += num_wrong
    assert num_rolled_back > 0
    return torch.cat(rows)
