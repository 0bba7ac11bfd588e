"""Quantized checkpoints: loaded by transformers' quantizers, tried out at load, refused with a library's own reason."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lines import logged
from models.blocks import random_ids, stock_logits
from models.published import damage_weights
from passes import forward
from torch import Tensor
from transformers.quantizers import HfQuantizer, auto, register_quantization_config, register_quantizer
from transformers.utils.import_utils import KERNELS_MIN_VERSION, is_kernels_available
from transformers.utils.quantization_config import QuantizationConfigMixin

from amusd.checkpoints.building import load_model
from amusd.checkpoints.loading import load_target
from amusd.checkpoints.transformers_models import forbid_kernels
from amusd.config import EngineConfig, TargetConfig
from amusd.models.numerics import Numerics
from amusd.runner.load_options import LoadOptions

METHOD = "halves"
RULE = Numerics(width=8, fixed=True, prefill_chunk=32)


class HalvesConfig(QuantizationConfigMixin):  # type: ignore[misc]  # transformers is untyped
    """`by_batch`: the rows of a product share a scale."""

    def __init__(self, by_batch: bool = False, **_others: Any) -> None:
        self.quant_method, self.by_batch = METHOD, by_batch


class HalvedLinear(torch.nn.Linear):
    """Its stored weight is half of the one that it multiplies with."""

    by_batch = False

    def forward(self, rows: Tensor) -> Tensor:
        scale = rows.abs().amax() if self.by_batch else rows.abs().amax(dim=-1, keepdim=True)
        return torch.nn.functional.linear((rows / scale * 64).round() / 64 * scale, self.weight * 2, self.bias)


class HalvesQuantizer(HfQuantizer):  # type: ignore[misc]
    """Stands in for a library: replaces the layers before weights are read."""

    def _process_model_before_weight_loading(self, model: Any, **_named: Any) -> None:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
                module.__class__ = HalvedLinear
                module.by_batch = self.quantization_config.by_batch

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quantizer is known, the library `kernels` may be hidden, and both end with the test."""
    for table in (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
        monkeypatch.setitem(table, METHOD, None)
        del table[METHOD]
    register_quantization_config(METHOD)(HalvesConfig)
    register_quantizer(METHOD)(HalvesQuantizer)
    monkeypatch.setitem(sys.modules, "kernels", None)
    monkeypatch.delitem(sys.modules, "kernels")


@pytest.fixture
def quantize(plain_checkpoint: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a checkpoint with these settings of the quantizer."""

    def write(settings: Any) -> Path:
        shutil.copytree(plain_checkpoint, tmp_path, dirs_exist_ok=True)
        config = json.loads((plain_checkpoint / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
        return tmp_path

    return write


def load(folder: Path, **options: Any) -> tuple[Any, list[str]]:
    options = {"numerics": RULE, "max_model_len": 64, "dtype": "float32", **options}
    with logged() as lines:
        return load_model(folder, LoadOptions(**options)), lines


def test_a_quantized_checkpoint_is_computed_by_the_quantizer_of_transformers(quantize: Callable[..., Path]) -> None:
    folder, token_ids = quantize({"quant_method": METHOD}), random_ids(8)
    model, lines = load(folder)
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert isinstance(stock.base_model.layers[0].mlp.up_proj, HalvedLinear)
    torch.testing.assert_close(forward(model, token_ids, model.new_cache(8)).logits, stock_logits(stock, token_ids))
    assert (model.implementation, lines) == ("transformers", [])


def test_a_model_whose_rows_depend_on_each_other_says_so_in_one_line(quantize: Callable[..., Path]) -> None:
    folder = quantize({"quant_method": METHOD, "by_batch": True})
    with logged() as lines:
        load_target(EngineConfig(target=TargetConfig(kind="hf", model=str(folder), dtype="float32")), "cpu")
    assert lines[0] == (
        f"model {folder}: a token's logits depend on how many tokens share its pass, "
        "so the modes may give different answers"
    )
    _, lines = load(folder, numerics=Numerics(width=8, fixed=False))
    assert not lines, "nothing was promised"


def test_weights_that_are_no_numbers_are_not_taken_for_rows_that_depend_on_each_other(
    quantize: Callable[..., Path],
) -> None:
    folder = quantize({"quant_method": METHOD})
    damage_weights(folder)
    assert load(folder)[1] == []


def test_kernels_from_a_hub_are_out_of_reach_of_their_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels.py").write_text(f"__version__ = '{KERNELS_MIN_VERSION}'\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    is_kernels_available.cache_clear()
    assert is_kernels_available()
    forbid_kernels()
    assert not is_kernels_available()
    with pytest.raises(ImportError):
        __import__("kernels")
