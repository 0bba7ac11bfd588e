"""Decode in passes over several paths, in which any track may hold the right tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from models.blocks import random_ids
from passes import forward, prefilled
from torch import Tensor

from amusd.models.kv_cache import KVCache
from amusd.models.passes import Paths, Rows
from amusd.protocol.verification import Tracks
from amusd.runner.model_runner import ModelRunner


def tree_rows(token_ids: list[int], prefix: npt.NDArray[np.int64], paths: list[list[int]], cache: KVCache) -> Rows:
    return Rows(token_ids, cache, paths=Paths(prefix, paths))


@dataclass
class RandomPaths:
    """The rows of one pass: a path of right tokens between wrong paths, in random tracks."""

    token_ids: list[int]
    parents: list[int]
    right: list[int]


def random_paths(rng: random.Random, right: Sequence[int], max_rows: int, num_tracks: int, width: int) -> RandomPaths:
    """`right`: the tokens from the first row on, of which some come up; `max_rows`: of one path; `width`: of all."""
    found = RandomPaths([right[0]], [], [0])
    tracks, places = Tracks(num_tracks), [(0, 0)]
    num_right = rng.randint(1, min(max_rows, len(right)))
    for _ in range(rng.randint(0, 30)):
        goes_on = len(found.right) < num_right and rng.random() < 0.4
        parent = found.right[-1] if goes_on else rng.randrange(len(found.token_ids))
        depth, parent_track = places[parent][0] + 1, places[parent][1]
        track = tracks.place(depth, parent_track) if depth < max_rows else None
        if track is None:
            continue
        if goes_on:
            found.right.append(len(found.token_ids))
        token_id = right[depth] if goes_on else rng.randrange(3, 97)
        found.token_ids.append(token_id)
        found.parents.append(parent)
        places.append((depth, track))
        if len(found.token_ids) == width:
            break
    return found


def decoded_both_ways(model: ModelRunner, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Logits after each token from the 20th on, one at a time and in passes over paths: [tokens, vocabulary] each."""
    token_ids, start = random_ids(num_tokens), 20
    cache = prefilled(model, token_ids[:start], num_tokens + model.numerics.width)
    expected = [forward(model, [token_id], cache).logits[0].clone() for token_id in token_ids[start:]]
    return torch.stack(expected), torch.stack(decode_in_paths(model, token_ids, start))


def decode_in_paths(model: ModelRunner, token_ids: list[int], start: int, cache: KVCache | None = None) -> list[Tensor]:
    """Logits after each of `token_ids` from `start` on. Many of their rows were not in the first track.

    `cache`: one that holds the tokens before `start`, if there is one.
    """
    rng = random.Random(2)
    if cache is None:
        cache = prefilled(model, token_ids[:start], len(token_ids) + model.numerics.width)
    logits: list[Tensor] = []
    num_moved = 0
    while cache.length < len(token_ids):
        at = cache.length
        right = token_ids[at:]
        if model.numerics.tracks_at(at) == 1:
            logits.append(forward(model, right[:1], cache).logits[0].clone())
            continue
        rule = model.numerics
        paths = random_paths(rng, right, rule.max_rows(at), rule.tracks_at(at), rule.width)
        scores = forward(model, paths.token_ids, cache, parents=paths.parents).logits
        assert cache.length == at
        logits += [scores[row].clone() for row in paths.right]
        model.keep(paths.right, cache)
        assert cache.length == at + len(paths.right)
        num_moved += paths.right != list(range(len(paths.right)))
    assert num_moved > 2
    return logits
