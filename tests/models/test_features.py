"""The features that a pass writes for drafters are the `hidden_states` of transformers, however rows are laid out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from models import tiny
from models.tiny import wrap_model
from passes import forward, prefilled
from torch import Tensor

from amusd.models.attention import register_attention
from amusd.models.features import FeatureSpec
from amusd.models.numerics import Numerics
from amusd.runner.graphs import run_each_time
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner

CONFIG = tiny.tiny_config("LlamaConfig")
WIDTH = CONFIG.hidden_size
LAYERS = (0, CONFIG.num_hidden_layers - 1, CONFIG.num_hidden_layers)
REDUCED = torch.randn(5, len(LAYERS) * WIDTH, generator=torch.Generator().manual_seed(0)) / 10
SPECS = {"whole": FeatureSpec(LAYERS, len(LAYERS) * WIDTH), "reduced": FeatureSpec(LAYERS, 5, {"fc.weight": REDUCED})}
TEXT = [(5 * place * place + 7) % (tiny.VOCAB - 3) + 3 for place in range(50)]
CPU_RULE = Numerics(width=8, fixed=True, prefill_chunk=32, num_tracks=3)
RULES = {
    "cpu": CPU_RULE,
    "fixed": Numerics(width=8, fixed=True, has_borders=False, prefill_chunk=32, num_tracks=3),
    "bucketed": Numerics(width=8, fixed=False, has_borders=False, prefill_chunk=32, num_tracks=3),
}


def model_of(numerics: Numerics, model_impl: str) -> ModelRunner:
    options = LoadOptions(numerics=numerics, max_model_len=120, dtype="float32", model_impl=model_impl, features=SPECS)
    if numerics is not CPU_RULE:
        options = replace(options, capture=run_each_time)
    return wrap_model(tiny.tiny_causal_lm(CONFIG, register_attention()), options)


def expected(token_ids: list[int]) -> Tensor:
    """Features as transformers computes them: [tokens, layers * width]."""
    stock = tiny.tiny_causal_lm(CONFIG)
    with torch.inference_mode():
        states = stock(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in LAYERS], dim=-1)


def check(model: ModelRunner, cache: object, token_ids: list[int], start: int = 0) -> None:
    columns = model.feature_columns
    (features,) = model.read_features([(cache, range(start, len(token_ids)))])  # type: ignore[list-item]
    whole, reduced = (features[:, columns[name]] for name in SPECS)
    assert whole.dtype is torch.bfloat16
    states = expected(token_ids)[start:]
    torch.testing.assert_close(whole.float(), states, rtol=0.01, atol=0.01)
    torch.testing.assert_close(reduced.float(), states @ REDUCED.T, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("model_impl", ["amusd", "transformers"])
@pytest.mark.parametrize("numerics", RULES.values(), ids=RULES)
def test_prompts_blocks_and_kept_rows_write_the_states_of_their_tokens(numerics: Numerics, model_impl: str) -> None:
    model = model_of(numerics, model_impl)
    cache = prefilled(model, TEXT[:40], 100)
    forward(model, TEXT[40:46], cache)
    cache.truncate(43)
    forward(model, TEXT[43:47], cache)
    check(model, cache, TEXT[:47])
    check(model, cache, TEXT[:47], start=44)
    cache.truncate(33)
    assert model.numerics.tracks_at(33) > 1
    forward(model, [TEXT[33], 9, TEXT[34], TEXT[35]], cache, parents=[0, 0, 2])
    model.keep([0, 2, 3], cache)
    check(model, cache, TEXT[:36])
