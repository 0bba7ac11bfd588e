"""Measures whether a token's logits depend on other rows of its pass. With `verify_width=fixed` they must not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from amusd.models.kv_cache import KVCache
from amusd.models.passes import Rows
from amusd.runner.model_runner import ModelRunner

BLOCK_LENGTHS = (3, 1, 8, 5, 2, 7, 4, 6)
NEIGHBOURS = (1, 5)
"""Each further sequence has the tokens rotated by one of these."""


def measure_width_invariance(
    model: ModelRunner, prompt: Sequence[int], num_tokens: int, num_caches: int = 1 + len(NEIGHBOURS)
) -> list[float]:
    """For each row, the largest difference of a logit between passes of one token and of more; 0: none.

    `num_tokens` are decoded greedily one by one, then computed again in ragged blocks, among other paths, and beside
    other sequences. All share a memory of `num_caches` caches; a GPU computes rows of each. Raises `NotFiniteError`.
    """
    several, found = model.new_caches(num_caches, len(prompt) + num_tokens)[: 1 + len(NEIGHBOURS)], list[float]()
    for caches, ways in ((several[:1], (_in_batches, _in_paths)), (several, (_in_batches,))):
        tokens, expected = list(prompt), []
        caches[0].truncate(0)
        model.prefill(prompt[:-1], caches[0])
        for _ in range(num_tokens):
            [output] = model.run([Rows(tokens[-1:], caches[0])])
            output.check()
            expected.append(model.fetch(output.logits[0]))  # [vocab]
            tokens.append(int(expected[-1].argmax()))
        for pass_tokens in ways:
            caches[0].truncate(0)
            model.prefill(prompt[:-1], caches[0])
            for position, logits in pass_tokens(model, tokens[:-1], caches):
                other = expected[position - len(prompt) + 1]
                found.append(0.0 if torch.equal(logits, other) else float((logits - other).abs().max()))
    return found


def _in_paths(model: ModelRunner, tokens: Sequence[int], caches: Sequence[KVCache]) -> list[tuple[int, Tensor]]:
    """Position and logits [vocab] from passes with the next token on the last track, after other tokens."""
    found, cache = [], caches[0]
    while (start := cache.length) < len(tokens):
        num_others = min(model.numerics.tracks_at(start), model.numerics.width - 1) - 1
        if num_others < 1 or start + 1 == len(tokens):
            model.run([Rows(tokens[start : start + 1], cache)])
            continue
        others = [(tokens[start + 1] + number) % model.vocab_size for number in range(1, num_others + 1)]
        rows = [tokens[start], *others, tokens[start + 1]]
        scores = model.run([Rows(rows, cache, parents=[0] * (num_others + 1))])[0].logits
        found += [(start, model.fetch(scores[0])), (start + 1, model.fetch(scores[-1]))]
        model.keep([0, num_others + 1], cache)
    return found


def _in_batches(model: ModelRunner, tokens: Sequence[int], caches: Sequence[KVCache]) -> list[tuple[int, Tensor]]:
    """Position and logits [vocab] from passes of ragged blocks, at changing places among the other sequences."""
    found: list[tuple[int, Tensor]] = []
    lengths, places, start = itertools.cycle(BLOCK_LENGTHS), itertools.count(), caches[0].length
    sequences = [tokens, *([*tokens[shift:], *tokens[:shift]] for shift in NEIGHBOURS[: len(caches) - 1])]
    for number in range(1, len(caches)):
        model.prefill(sequences[number][: max(0, start - number)], caches[number])
    while (first := caches[0].length) < len(tokens):
        batch = []
        for cache, sequence in zip(caches, sequences, strict=True):
            length = min(next(lengths), model.numerics.max_rows(cache.length))
            if block := sequence[cache.length :][:length]:
                batch.append(Rows(block, cache))
        place = next(places) % len(batch)
        batch.insert(place, batch.pop(0))
        found += enumerate(model.fetch(model.run(batch)[place].logits), start=first)
    return found
