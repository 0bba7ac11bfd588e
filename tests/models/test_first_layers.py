"""`drafter=self`: the first layers of the target's checkpoint below its norm and its head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import tiny
from models.blocks import random_ids
from passes import forward

from amusd.config import DrafterConfig, EngineConfig, TargetConfig
from amusd.errors import ConfigError
from amusd.models.cached_model import CachedModel
from amusd.models.loading import load_draft_model

LAYERS = 4
VOCAB = 300
"""Room for the tokens of `tiny.byte_tokenizer`."""


def engine_of(folder: Path, num_layers: int | None) -> EngineConfig:
    drafter = DrafterConfig(kind="self", num_layers=num_layers, dtype="float32")
    return EngineConfig(target=TargetConfig(kind="hf", model=str(folder)), drafters=(drafter,), max_model_len=64)


def first_layers(folder: Path, num_layers: int | None) -> CachedModel:
    engine = engine_of(folder, num_layers)
    return load_draft_model(engine.drafters[0], engine, "cpu")[0]


@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen3Config", "Gemma3TextConfig"])
@pytest.mark.parametrize("num_layers", [3])
def test_it_computes_what_the_target_cut_behind_these_layers_computes(
    name: str, num_layers: int, tmp_path: Path
) -> None:
    config = tiny.tiny_config(name, num_hidden_layers=LAYERS, vocab_size=VOCAB)
    stock = tiny.save_checkpoint(tmp_path, config, tiny.byte_tokenizer())
    stock.model.layers = stock.model.layers[:num_layers]
    token_ids = random_ids(12, 5)
    with torch.no_grad():
        expected = stock(torch.tensor([token_ids])).logits[0]
    ours = first_layers(tmp_path, num_layers)
    torch.testing.assert_close(forward(ours, token_ids, ours.new_cache(12)).logits, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("num_layers", [LAYERS, LAYERS + 1])
def test_as_many_layers_as_the_target_has_are_refused_before_weights_are_read(num_layers: int, tmp_path: Path) -> None:
    tiny.tiny_config(num_hidden_layers=LAYERS).save_pretrained(tmp_path)  # there are none
    engine = engine_of(tmp_path, num_layers)
    said = f"drafter.num_layers={num_layers}: the target has 4 layers; allowed: 1 to 3"
    with pytest.raises(ConfigError) as caught:
        load_draft_model(engine.drafters[0], engine, "cpu")
    assert str(caught.value) == said


@pytest.mark.parametrize(("num_layers", "expected"), [(8, 2), (3, 1)])
def test_without_a_number_a_quarter_of_the_target_drafts(num_layers: int, expected: int, tmp_path: Path) -> None:
    config = tiny.tiny_config(num_hidden_layers=num_layers, vocab_size=VOCAB)
    tiny.save_checkpoint(tmp_path, config, tiny.byte_tokenizer())
    default, asked = first_layers(tmp_path, None), first_layers(tmp_path, expected)
    assert default.parameter_bytes == asked.parameter_bytes
