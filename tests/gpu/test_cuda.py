"""The embedded target on a CUDA device (`make test-gpu`). Bit-equality there is for `amusd doctor` to measure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from amusd.models.cached_model import CachedModel
from amusd.models.huggingface import load_model
from amusd.models.numerics import Numerics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.embedded,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TOKENS = [1, 4093, 198, 28120, 314, 260, 6376, 4461, 47, 2, 198, 1, 520, 9531, 198]


def load(folder: Path, device: str, *, fixed: bool) -> CachedModel:
    numerics = Numerics(width=8, fixed=fixed)
    return load_model(folder, numerics=numerics, max_model_len=256, dtype="float32", device=device)


@pytest.mark.parametrize("fixed", [True, False])
def test_the_device_computes_what_the_cpu_does(embedded_folder: Path, fixed: bool) -> None:
    logits = []
    for device in ("cpu", "cuda:0"):
        model = load(embedded_folder, device, fixed=fixed)
        cache = model.new_cache(64)
        model.prefill(TOKENS[:-5], cache)
        logits.append(model.forward(TOKENS[-5:], cache).logits.float().cpu())
    torch.testing.assert_close(logits[1], logits[0], atol=5e-2, rtol=1e-3)
    assert torch.equal(logits[1].argmax(-1), logits[0].argmax(-1))


def test_a_rolled_back_cache_on_the_device_equals_a_fresh_one(embedded_folder: Path) -> None:
    model = load(embedded_folder, "cuda:0", fixed=True)
    cache, fresh = model.new_cache(64), model.new_cache(64)
    model.prefill(TOKENS[:-5], cache)
    model.forward([7, 7, 7, 7], cache)
    cache.truncate(len(TOKENS) - 5)
    model.prefill(TOKENS[:-5], fresh)
    rolled_back = model.forward(TOKENS[-5:], cache).logits
    torch.testing.assert_close(rolled_back, model.forward(TOKENS[-5:], fresh).logits, atol=1e-3, rtol=1e-3)
