"""Which forward pass computes a model: the decoder where it covers it, or what the key `model_impl` asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import tiny

from amusd.config import EngineConfig, TargetConfig
from amusd.errors import UnsupportedModelError
from amusd.models.configuration import ModelConfig, load_config
from amusd.models.huggingface import load_model
from amusd.models.load_options import LoadOptions
from amusd.models.loading import check_target
from amusd.models.numerics import Numerics

NOT_COVERED = {
    "another family": ("GemmaConfig", {}),
    "a quantized checkpoint": ("LlamaConfig", {"quantization_config": {"quant_method": "awq", "bits": 4}}),
    "another activation": ("LlamaConfig", {"hidden_act": "gelu"}),
    "another rope": ("LlamaConfig", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}),
}


@pytest.mark.parametrize(("name", "changes"), NOT_COVERED.values(), ids=NOT_COVERED)
def test_what_the_decoder_does_not_cover_is_left_to_transformers(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    tiny.tiny_config(name, **changes).save_pretrained(tmp_path)
    assert not isinstance(load_config(tmp_path), ModelConfig)
    with pytest.raises(UnsupportedModelError, match=r"model_impl=amusd: this model of type '.*' is not one that"):
        load_config(tmp_path, model_impl="amusd")


def test_auto_picks_the_decoder_where_it_covers_the_model_and_the_adapter_elsewhere(tmp_path: Path) -> None:
    found = []
    for name in ("LlamaConfig", "GemmaConfig"):
        tiny.save_checkpoint(tmp_path / name, tiny.tiny_config(name))
        options = LoadOptions(numerics=Numerics(width=8, fixed=True), max_model_len=64, dtype="float32")
        found.append(load_model(tmp_path / name, options).implementation)
    assert found == ["amusd", "transformers"]


def test_what_cannot_run_is_refused_without_its_weights(tmp_path: Path) -> None:
    tiny.tiny_config("GemmaConfig").save_pretrained(tmp_path)  # a folder without weights
    model = {"kind": "hf", "model": str(tmp_path)}
    check_target(EngineConfig(target=TargetConfig(**model)), "cpu")
    with pytest.raises(UnsupportedModelError, match=r"model_impl=amusd: this model of type 'gemma'"):
        check_target(EngineConfig(target=TargetConfig(**model, model_impl="amusd")), "cpu")
