"""Measures whether a token's logits depend on what shares its pass. They must not under `verify_width=fixed`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from amusd.models.cached_model import CachedModel
from amusd.models.kv_cache import KVCache
from amusd.models.passes import Rows

_Way: TypeAlias = Callable[[CachedModel, Sequence[int], Sequence[KVCache]], list[tuple[int, Tensor]]]
"""Passes tokens after what the first cache holds; returns position and logits [vocab] of each."""

BLOCK_LENGTHS = (3, 1, 8, 5, 2, 7, 4, 6)
NEIGHBOURS = (1, 5)
"""Other sequences: the same tokens, rotated by so many."""


def rows_agree(model: CachedModel) -> bool:
    """Whether tokens get the same logits, bit for bit, in passes of 1, 3 and 8 rows."""
    token_ids = [number * 97 % model.vocab_size for number in range(min(8, model.max_length))]
    [cache] = model.new_caches(1, len(token_ids))
    found = []
    for rows in (1, 3, 8):
        cache.truncate(0)
        parts = []
        while (start := cache.length) < len(token_ids):
            end = start + min(rows, model.numerics.max_rows(start))
            parts.append(model.run([Rows(token_ids[start:end], cache)])[0].logits.clone())
        found.append(torch.cat(parts))
    return all(torch.equal(logits, found[0]) for logits in found)


def measure_width_invariance(model: CachedModel, prompt: Sequence[int], num_tokens: int) -> list[float]:
    """Largest difference of a row's logits between passes of one token and of more; 0: none.

    `num_tokens` are decoded greedily one by one, then passed again in ragged blocks, among other paths, and beside
    other sequences, over one memory.
    """
    capacity = len(prompt) + num_tokens
    alone, caches = model.new_caches(1, capacity), model.new_caches(1 + len(NEIGHBOURS), capacity)
    found = _differences(model, prompt, num_tokens, alone, (_in_batches, _in_paths))
    return found + _differences(model, prompt, num_tokens, caches, (_in_batches,))


def _differences(
    model: CachedModel, prompt: Sequence[int], num_tokens: int, caches: Sequence[KVCache], ways: Sequence[_Way]
) -> list[float]:
    cache = caches[0]
    tokens, rows = list(prompt), []
    model.prefill(prompt[:-1], cache)
    for _ in range(num_tokens):
        logits = model.run([Rows(tokens[-1:], cache)])[0].logits[0]  # [vocab]
        rows.append(logits.clone())
        tokens.append(int(logits.argmax()))
    found = []
    for pass_tokens in ways:
        for other in caches:
            other.truncate(0)
        model.prefill(prompt[:-1], cache)
        for position, logits in pass_tokens(model, tokens[:-1], caches):
            expected = rows[position - len(prompt) + 1]
            found.append(0.0 if torch.equal(logits, expected) else float((logits - expected).abs().max()))
    return found


def _in_paths(model: CachedModel, tokens: Sequence[int], caches: Sequence[KVCache]) -> list[tuple[int, Tensor]]:
    """Position and logits [vocab] from passes that hold the next token after others, on the lower tracks."""
    found, cache = [], caches[0]
    while (start := cache.length) < len(tokens):
        num_others = min(model.numerics.tracks_at(start), model.numerics.width - 1) - 1
        if num_others < 1 or start + 1 == len(tokens):
            model.run([Rows(tokens[start : start + 1], cache)])
            continue
        others = [(tokens[start + 1] + number) % model.vocab_size for number in range(1, num_others + 1)]
        rows = [tokens[start], *others, tokens[start + 1]]
        scores = model.run([Rows(rows, cache, parents=[0] * (num_others + 1))])[0].logits
        found += [(start, scores[0].clone()), (start + 1, scores[-1].clone())]
        model.keep([0, num_others + 1], cache)
    return found


def _in_batches(model: CachedModel, tokens: Sequence[int], caches: Sequence[KVCache]) -> list[tuple[int, Tensor]]:
    found, start = [], caches[0].length
    sequences = [tokens, *([*tokens[shift:], *tokens[:shift]] for shift in NEIGHBOURS[: len(caches) - 1])]
    for number in range(1, len(caches)):
        model.prefill(sequences[number][: max(0, start - number)], caches[number])
    lengths = itertools.cycle(BLOCK_LENGTHS)
    turn = 0
    while caches[0].length < len(tokens):
        batch = []
        for cache, sequence in zip(caches, sequences, strict=True):
            first = cache.length
            block = (
                sequence[first : first + min(next(lengths), model.numerics.max_rows(first))]
                if first < len(tokens)
                else ()
            )
            if block:
                batch.append(Rows(block, cache))
        place, first, turn = turn % len(batch), caches[0].length, turn + 1
        batch = batch[1 : 1 + place] + batch[:1] + batch[1 + place :]
        found += list(enumerate(model.run(batch)[place].logits.clone(), start=first))
    return found
