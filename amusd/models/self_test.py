"""Measures, on this machine, whether a token's logits depend on the block it is verified in.

They must not under `verify_width=fixed`; whether they do is a matter of the kernels of one torch build on one device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from amusd.models.language_model import LanguageModel

BLOCK_LENGTHS = (3, 1, 8, 5, 2, 7, 4, 6)
"""Blocks of the second run, round after round, cut where the model's rule cuts them."""


@dataclass(frozen=True, slots=True)
class WidthInvariance:
    """Outcome of `measure_width_invariance`."""

    num_rows: int
    num_equal: int
    """Rows whose logits are equal bit for bit."""
    max_difference: float
    """Largest difference of two logits; 0 where all rows are equal."""

    @property
    def holds(self) -> bool:
        """Every row is equal."""
        return self.num_equal == self.num_rows


def measure_width_invariance(model: LanguageModel, prompt: Sequence[int], num_tokens: int) -> WidthInvariance:
    """Decode `num_tokens` greedily one by one, then pass the same tokens in ragged blocks, and compare the logits."""
    capacity = len(prompt) + num_tokens
    cache = model.new_cache(capacity)
    model.prefill(prompt[:-1], cache)
    tokens, rows = list(prompt), []
    for _ in range(num_tokens):
        logits = model.forward(tokens[-1:], cache).logits[0]  # [vocab]
        rows.append(logits.clone())
        tokens.append(int(logits.argmax()))
    cache.truncate(0)
    model.prefill(prompt[:-1], cache)
    num_equal, difference, done = 0, 0.0, 0
    for length in itertools.cycle(BLOCK_LENGTHS):
        if done == num_tokens:
            break
        start = cache.length
        block = tokens[start : start + min(length, model.max_rows(start), num_tokens - done)]
        for logits in model.forward(block, cache).logits:
            num_equal += torch.equal(logits, rows[done])
            difference = max(difference, float((logits - rows[done]).abs().max()))
            done += 1
    return WidthInvariance(num_tokens, num_equal, difference)
