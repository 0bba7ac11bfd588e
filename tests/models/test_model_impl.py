"""Which forward pass computes a model, and why: `why_not_covered` and the key `model_impl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import tiny

from amusd.config import DrafterConfig, EngineConfig, TargetConfig
from amusd.errors import UnsupportedModelError
from amusd.models.attention import register_attention
from amusd.models.cached_model import CachedModel
from amusd.models.compatibility import why_not_covered
from amusd.models.huggingface import wrap_model
from amusd.models.load_options import LoadOptions
from amusd.models.loading import check_drafter, check_target
from amusd.models.numerics import Numerics

RULE = Numerics(width=8, fixed=True, border=32, prefill_chunk=32)

NOT_COVERED = {
    "another family": ("GemmaConfig", {}, "only the model types llama, mistral, qwen2, qwen3 have a lean decoder"),
    "a quantized checkpoint": (
        "LlamaConfig",
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        "its checkpoint is quantized",
    ),
    "another activation": ("LlamaConfig", {"hidden_act": "gelu"}, "its activation is gelu, not silu"),
    "another rope": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
        "its rotary embedding is of type proportional",
    ),
}


@pytest.mark.parametrize(("name", "changes", "reason"), NOT_COVERED.values(), ids=NOT_COVERED)
def test_what_is_not_covered_has_a_reason(name: str, changes: dict[str, Any], reason: str) -> None:
    assert why_not_covered(tiny.tiny_config(name, **changes)) == reason


def wrapped(config: Any, model_impl: str) -> CachedModel:
    source = tiny.tiny_causal_lm(config, register_attention())
    return wrap_model(source, LoadOptions(numerics=RULE, max_model_len=64, model_impl=model_impl))


UNCOVERED = [tiny.tiny_config("GemmaConfig"), tiny.tiny_config(hidden_act="gelu")]


def test_auto_picks_the_decoder_where_it_covers_the_model_and_the_adapter_elsewhere() -> None:
    assert wrapped(tiny.tiny_config(), "auto").implementation == "amusd"
    assert [wrapped(config, "auto").implementation for config in UNCOVERED] == ["transformers"] * 2


def test_what_cannot_run_is_refused_without_its_weights(tmp_path: Path) -> None:
    tiny.tiny_config("GemmaConfig").save_pretrained(tmp_path)  # a folder without weights
    model = {"kind": "hf", "model": str(tmp_path)}
    engine = EngineConfig(target=TargetConfig(**model))
    check_target(engine, "cpu")
    check_drafter(DrafterConfig(kind="ngram"), engine, "cpu")
    refused = EngineConfig(target=TargetConfig(**model, model_impl="amusd"))
    with pytest.raises(UnsupportedModelError, match="model_impl=amusd: model type 'gemma'"):
        check_target(refused, "cpu")
    with pytest.raises(UnsupportedModelError, match="model_impl=amusd: model type 'gemma'"):
        check_drafter(DrafterConfig(**model, model_impl="amusd"), engine, "cpu")
