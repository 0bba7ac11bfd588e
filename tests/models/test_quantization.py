"""Which quantized checkpoints are refused: by config.json alone, in one line that names the method and what to do."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from models.published import CONFIGS, write_config

from amusd.config import DrafterConfig, EngineConfig
from amusd.errors import UnsupportedModelError
from amusd.models.compatibility import is_fp8, why_not_run
from amusd.models.huggingface import load_model
from amusd.models.load_options import LoadOptions
from amusd.models.loading import check_drafter
from amusd.models.numerics import Numerics

OPTIONS = LoadOptions(numerics=Numerics(width=8, fixed=True), max_model_len=64)
WEIGHTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "channel",
    "symmetric": True,
    "type": "float",
}
ACTIVATIONS = {**WEIGHTS, "dynamic": True, "observer": None, "strategy": "token"}
FP8_DYNAMIC = {
    "config_groups": {
        "group_0": {
            "input_activations": ACTIVATIONS,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": WEIGHTS,
        }
    },
    "format": "float-quantized",
    "global_compression_ratio": 1.5,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
"""The settings of the checkpoints that are published as FP8-dynamic."""


def changed(part: str | None = None, **changes: Any) -> dict[str, Any]:
    """`FP8_DYNAMIC` with other settings, or with other ones of its weights or activations."""
    settings = copy.deepcopy(FP8_DYNAMIC)
    place: Any = settings if part is None else settings["config_groups"]["group_0"][part]
    place.update(changes)
    return settings


def without(part: str) -> dict[str, Any]:
    settings = copy.deepcopy(FP8_DYNAMIC)
    settings["config_groups"]["group_0"][part] = None
    return settings


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
TWO_GROUPS = {"group_0": {}, "group_1": {}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, "AWQ"),
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "GPTQ"),
    "bitsandbytes in 8 bits": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
        r"bitsandbytes \(8 bits\): .* a row depends on the others",
    ),
    "bitsandbytes in 4 bits": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        r"bitsandbytes \(4 bits\): .* another kernel",
    ),
    "bitsandbytes without its name": ({"load_in_4bit": True}, r"bitsandbytes \(4 bits\)"),
    "MXFP4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}, "MXFP4"),
    "torchao": ({"quant_method": "torchao", "quant_type": {}}, "torchao: its weights are stored as objects"),
    "FBGEMM": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "FBGEMM FP8: .* clip"),
    "FP8 by blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        "FP8 by blocks of 128 x 128",
    ),
    "FP8 per tensor": (
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        "FP8 per tensor: one scale for all rows makes a row depend on the others",
    ),
    "FP8 per tensor, fixed": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        "FP8 per tensor: its activations have a scale fixed beforehand",
    ),
    "ModelOpt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt"),
    "something new": ({"quant_method": "exl9"}, "exl9: unknown here"),
    "something without a name": ({"bits": 3}, "a method that it does not name: unknown here"),
    "compressed-tensors, weights in int4": (
        changed("weights", **INT4),
        "compressed-tensors: its weights have num_bits=4, allowed: 8",
    ),
    "compressed-tensors, int8": (changed("weights", type="int"), "its weights have type=int, allowed: float"),
    "compressed-tensors, weights per tensor": (
        changed("weights", strategy="tensor"),
        "its weights have strategy=tensor, allowed: channel",
    ),
    "compressed-tensors, activations per tensor": (
        changed("input_activations", strategy="tensor"),
        "its input_activations have strategy=tensor, allowed: token",
    ),
    "compressed-tensors, fixed activations": (
        changed("input_activations", dynamic=False),
        "its input_activations have dynamic=False, allowed: True",
    ),
    "compressed-tensors, weights alone": (without("input_activations"), "its input_activations are not quantized"),
    "compressed-tensors, keys and values": (changed(kv_cache_scheme=WEIGHTS), "its keys and values are quantized"),
    "compressed-tensors, sparse": (changed(sparsity_config={"format": "sparse-24-bitmask"}), "its weights are sparse"),
    "compressed-tensors, packed": (changed(format="pack-quantized"), "its format is pack-quantized"),
    "compressed-tensors, two groups": (changed(config_groups=TWO_GROUPS), "it has 2 groups of layers, allowed: 1"),
}
LIBRARIES = (
    "accelerate", "auto_gptq", "autoawq", "awq", "bitsandbytes", "compressed_tensors", "fbgemm_gpu", "gptqmodel",
    "kernels", "torchao",
)  # fmt: skip


def folder_of(folder: Path, settings: dict[str, Any], name: str = "Llama 3.1") -> Path:
    """A checkpoint without weights: none may be read."""
    write_config(folder, {**CONFIGS[name], "quantization_config": settings})
    return folder


def check(folder: Path, options: LoadOptions) -> None:
    named: dict[str, Any] = {"dtype": options.dtype, "model_impl": options.model_impl}
    check_drafter(DrafterConfig(kind="hf", model=str(folder), **named), EngineConfig(), options.device)


@pytest.mark.parametrize("use", [load_model, check], ids=["load", "check"])
@pytest.mark.parametrize(("settings", "reason"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_by_name_before_a_weight_or_a_library_is_touched(
    settings: dict[str, Any], reason: str, use: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in LIBRARIES:
        monkeypatch.setitem(sys.modules, library, None)  # importing it raises
    pattern = rf"^model {tmp_path}: quantized (with|in) .*{reason}.*; use the checkpoint in bfloat16, or one in FP8 of"
    with pytest.raises(UnsupportedModelError, match=pattern) as caught:
        use(folder_of(tmp_path, settings), OPTIONS)
    assert "\n" not in str(caught.value)


def test_the_older_name_of_the_settings_is_known() -> None:
    config = transformers.AutoConfig.for_model(**CONFIGS["Llama 3.1"], compression_config={"quant_method": "gptq"})
    assert why_not_run(config) == "quantized with GPTQ: there are no products with such weights here"


def test_settings_that_transformers_has_read_are_known() -> None:
    settings = transformers.BitsAndBytesConfig(load_in_8bit=True)
    config = transformers.AutoConfig.for_model(**CONFIGS["Llama 3.1"], quantization_config=settings)
    assert "bitsandbytes (8 bits)" in str(why_not_run(config))


def test_fp8_dynamic_is_not_refused() -> None:
    config = transformers.AutoConfig.for_model(**CONFIGS["Llama 3.1"], quantization_config=FP8_DYNAMIC)
    assert is_fp8(config)
    assert why_not_run(config) is None
    plain = transformers.AutoConfig.for_model(**CONFIGS["Llama 3.1"])
    assert not is_fp8(plain)
    assert why_not_run(plain) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype=float16: the checkpoint is in FP8, allowed: bfloat16 or float32"),
        ({"dtype": "int8"}, "dtype=int8: the checkpoint is in FP8, allowed: bfloat16 or float32"),
        ({"model_impl": "transformers"}, "in FP8, which only the lean decoder multiplies: model_impl=transformers"),
    ],
)
@pytest.mark.parametrize("use", [load_model, check], ids=["load", "check"])
def test_what_fp8_cannot_be_combined_with_is_refused_before_weights_are_read(
    use: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings = LoadOptions(numerics=OPTIONS.numerics, max_model_len=64, **options)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        use(folder_of(tmp_path, FP8_DYNAMIC), settings)
    assert "\n" not in str(caught.value)


def test_fp8_of_a_model_without_a_lean_decoder_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, {"model_type": "gemma", "quantization_config": FP8_DYNAMIC})
    with pytest.raises(UnsupportedModelError, match="which only the lean decoder multiplies: only the model types"):
        load_model(tmp_path, OPTIONS)
