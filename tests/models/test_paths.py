"""Passes over several paths after one token: each row has the logits of its path alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import tiny
from models.blocks import UNLIKE, random_ids, stock_logits
from models.paths import decoded_both_ways, tree_rows
from passes import forward

from amusd.models.numerics import Numerics
from amusd.runner.graphs import run_each_time

FIXED = Numerics(width=8, fixed=True, prefill_chunk=64, num_tracks=3)
EXPERTS = {"GptOssConfig", "DeepseekV3Config"}


@pytest.mark.parametrize("name", UNLIKE)
def test_each_row_of_several_paths_has_the_logits_of_its_path_alone(name: str) -> None:
    _, model = tiny.wrapped_pair(name, FIXED)
    expected, found = decoded_both_ways(model, 80)
    if name not in EXPERTS:
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("replayed", [False, True], ids=["computed anew", "replayed"])
def test_several_paths_after_wider_ones_have_the_logits_of_stock(replayed: bool) -> None:
    """Rows of a pass can be kept only before the next pass, whatever its kind."""
    rule = Numerics(width=8, fixed=False, has_borders=False, prefill_chunk=32, num_tracks=3) if replayed else FIXED
    stock, model = tiny.wrapped_pair("LlamaConfig", rule, capture=run_each_time if replayed else None)
    prompt = random_ids(10)
    cache = model.new_cache(60, spare=8)
    model.prefill(prompt, cache)
    for parents in ([0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 2], [0, 0], [0]):
        tokens, paths = random_ids(len(parents) + 1, seed=len(parents)), [[0]]
        for row, parent in enumerate(parents, start=1):
            paths.append([*paths[parent], row])
        expected = [stock_logits(stock, prompt + [tokens[row] for row in path])[-1] for path in paths]
        logits = forward(model, tokens, cache, parents=parents).logits
        torch.testing.assert_close(logits, torch.stack(expected), atol=1e-3, rtol=1e-3)

    def tree_pass() -> None:
        model.run([tree_rows([5], np.arange(10), [[40]], cache)])

    for other in (lambda: forward(model, [5], cache).choose(), lambda: model.prefill([5], cache), tree_pass):
        forward(model, [5, 6, 7], cache, parents=[0, 0])
        other()
        length = cache.length
        with pytest.raises(ValueError, match="not one over paths"):
            model.keep([0, 2], cache)
        assert cache.length == length
        cache.truncate(10)
