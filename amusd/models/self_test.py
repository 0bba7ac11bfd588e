"""Measures, on this machine, whether a token's logits depend on the block or on the batch it is verified in.

They must not under `verify_width=fixed`; whether they do is a matter of the kernels of one torch build on one device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amusd.models.language_model import KVCache, LanguageModel, SequenceRows

BLOCK_LENGTHS = (3, 1, 8, 5, 2, 7, 4, 6)
"""Blocks of the second run, round after round, cut where the model's rule cuts them."""
NEIGHBOURS = (1, 5)
"""Other sequences of the last run: the same tokens, turned by as many."""


@dataclass(frozen=True, slots=True)
class WidthInvariance:
    """Outcome of `measure_width_invariance`."""

    num_rows: int
    """Rows that were compared."""
    num_equal: int
    """Rows whose logits are equal bit for bit."""
    max_difference: float
    """Largest difference of two logits; 0 where all rows are equal."""

    @property
    def holds(self) -> bool:
        """Every row is equal."""
        return self.num_equal == self.num_rows


def measure_width_invariance(model: LanguageModel, prompt: Sequence[int], num_tokens: int) -> WidthInvariance:
    """Decode `num_tokens` greedily one by one, then pass the same tokens in ragged blocks, and compare the logits.

    Where a pass has room, they are passed once more among other paths, in whatever track is free; and then beside
    other sequences, which have other lengths and blocks, in whatever order.
    """
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
    again = _in_blocks(model, tokens[:-1], cache)
    cache.truncate(0)
    model.prefill(prompt[:-1], cache)
    again += _in_paths(model, tokens[:-1], cache)
    again += _in_batches(model, tokens[:-1], len(prompt) - 1)
    num_equal, difference = 0, 0.0
    for position, logits in again:
        expected = rows[position - len(prompt) + 1]
        num_equal += torch.equal(logits, expected)
        difference = max(difference, float((logits - expected).abs().max()))
    return WidthInvariance(len(again), num_equal, difference)


def _in_blocks(model: LanguageModel, tokens: Sequence[int], cache: KVCache) -> list[tuple[int, Tensor]]:
    """Position and logits [vocab] of each of `tokens` behind what `cache` holds."""
    found = []
    lengths = itertools.cycle(BLOCK_LENGTHS)
    while (start := cache.length) < len(tokens):
        block = tokens[start : start + min(next(lengths), model.max_rows(start))]
        scores = model.forward(block, cache).logits.clone()
        found += list(enumerate(scores, start=start))
    return found


def _in_paths(model: LanguageModel, tokens: Sequence[int], cache: KVCache) -> list[tuple[int, Tensor]]:
    """The same from passes that begin with one token and hold the next one behind others; none where there is no room.

    The others come first, and so take the lower tracks.
    """
    found = []
    while (start := cache.length) < len(tokens):
        num_others = min(model.num_tracks(start), model.width - 1) - 1
        if num_others < 1 or start + 1 == len(tokens):
            model.forward(tokens[start : start + 1], cache)
            continue
        others = [(tokens[start + 1] + number) % model.vocab_size for number in range(1, num_others + 1)]
        rows = [tokens[start], *others, tokens[start + 1]]
        scores = model.forward(rows, cache, parents=[0] * (num_others + 1)).logits
        found += [(start, scores[0].clone()), (start + 1, scores[-1].clone())]
        model.keep([0, num_others + 1], cache)
    return found


def _in_batches(model: LanguageModel, tokens: Sequence[int], start: int) -> list[tuple[int, Tensor]]:
    """The same of the tokens from position `start` on, in passes that hold blocks of other sequences."""
    found = []
    caches = model.new_caches(1 + len(NEIGHBOURS), len(tokens))
    sequences = [tokens, *([*tokens[shift:], *tokens[:shift]] for shift in NEIGHBOURS)]
    for number, (cache, sequence) in enumerate(zip(caches, sequences, strict=True)):
        model.prefill(sequence[: max(0, start - number)], cache)
    lengths = itertools.cycle(BLOCK_LENGTHS)
    turn = 0
    while caches[0].length < len(tokens):
        batch = []
        for cache, sequence in zip(caches, sequences, strict=True):
            first = cache.length
            block = sequence[first : first + min(next(lengths), model.max_rows(first))] if first < len(tokens) else ()
            if block:
                batch.append(SequenceRows(block, cache))
        place, first, turn = turn % len(batch), caches[0].length, turn + 1
        batch = batch[1 : 1 + place] + batch[:1] + batch[1 + place :]
        found += list(enumerate(model.forward_batch(batch)[place].logits.clone(), start=first))
    return found
