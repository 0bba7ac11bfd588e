"""Models of public sizes with random weights: of the published sizes, finite, repeatable, loaded where they stay."""

from __future__ import annotations

import math

import pytest
import torch
from passes import forward, prefilled

from amusd.checkpoints.configuration import ModelConfig
from amusd.checkpoints.decoder_weights import load_decoder, weight_shapes
from amusd.checkpoints.loading import load_target
from amusd.checkpoints.synthetic import SHAPES, SyntheticTokenizer, random_weights
from amusd.checkpoints.vocabulary import HEAD
from amusd.config import EngineConfig, HardwareConfig, ModelShape
from amusd.models.numerics import Numerics
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner

PUBLISHED = {"smollm2-135m": 134_515_008, "llama-1b": 1_235_814_400}
PUBLISHED |= {"llama-8b": 8_030_261_248, "llama-70b": 70_553_706_496}
"""Parameters of the public checkpoints, an embedding that is the output head as well counted once."""
SMALL = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 96}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def small_config(shape: ModelShape, layers: int = 3) -> ModelConfig:
    return ModelConfig(**{**SHAPES[shape], **SMALL, "num_hidden_layers": layers})


@pytest.mark.parametrize("shape", PUBLISHED)
def test_a_shape_has_the_published_number_of_parameters(shape: ModelShape) -> None:
    sizes = {name: math.prod(sizes) for name, sizes in weight_shapes(ModelConfig(**SHAPES[shape])).items()}
    if SHAPES[shape]["tie_word_embeddings"]:
        del sizes[HEAD]
    assert sum(sizes.values()) == pytest.approx(PUBLISHED[shape], rel=0.01)


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    config = small_config("llama-1b")
    first, again, other = (random_weights(config, dtype=torch.float32, device="cpu", seed=seed) for seed in (5, 5, 6))
    assert first.keys() == again.keys()
    for name, weight in first.items():
        assert torch.equal(weight, again[name])
        assert torch.equal(weight, other[name]) == name.endswith("norm.weight")


@pytest.mark.parametrize(("shape", "dtype"), [("llama-8b", "bfloat16"), ("llama-1b", "float16")])
def test_eighty_layers_have_finite_logits_around_one(shape: ModelShape, dtype: str) -> None:
    config = small_config(shape, 80)
    options = LoadOptions(numerics=Numerics(width=8, fixed=True), max_model_len=64, dtype=dtype)
    weights = random_weights(config, dtype=getattr(torch, dtype), device="cpu", seed=0)
    model = ModelRunner(load_decoder(weights, config, options, 64), options, 64)
    cache = prefilled(model, range(32), 48)
    logits = forward(model, [1, 2, 3], cache).logits.float()
    assert logits.isfinite().all()
    assert 0.5 < logits.std() < 2


def test_a_named_shape_loads_as_the_target_and_does_not_repeat_one_token() -> None:
    config = EngineConfig(hardware=HardwareConfig(synthetic="smollm2-135m-slice"), drafters=(), max_model_len=64)
    model, tokenizer = load_target(config, "cpu")
    assert (model.vocab_size, model.max_length, model.implementation) == (49152, 64, "amusd")
    assert isinstance(tokenizer, SyntheticTokenizer)
    assert tokenizer.fingerprint == SyntheticTokenizer(49152).fingerprint
    answer = tokenizer.encode("hello")
    cache = prefilled(model, answer[:-1], 64)
    for _ in range(12):
        answer += forward(model, answer[-1:], cache).choose()
    assert len(set(answer[5:])) > 3
