"""A worker that cannot start on a GPU says so in one line, if possible before it reads weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import builders
from fake_cuda.device import fake_cuda
from models import tiny
from models.test_eagle import OPTIONS, save_eagle3
from torch import Tensor

from amusd.checkpoints.draft_networks import load_published
from amusd.checkpoints.loading import capture_for, load_target
from amusd.config import EngineConfig, HardwareConfig
from amusd.drafters.eagle import EagleDrafter
from amusd.engine import Engine
from amusd.errors import ConfigError
from amusd.models.linear import fastest_dtype
from amusd.runner import fallback
from amusd.runner.model_runner import ModelRunner

ON_GPU = EngineConfig(hardware=HardwareConfig(devices=("cuda:0", "cuda:0"), synthetic="llama-8b"), drafters=())


def build_launcher(folder: Path) -> Callable[[Tensor], Tensor]:
    build = pytest.importorskip("triton.runtime.build")

    def launch(rows: Tensor) -> Tensor:
        build._build("launcher", str(folder / "launcher.c"), str(folder), [], [], [], [])
        return rows

    return launch


@pytest.mark.parametrize("has_compiler", [False, True], ids=["no compiler", "no Python.h"])
def test_a_machine_on_which_triton_cannot_compile_computes_without_it_and_says_so_in_one_line(
    has_compiler: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fallback, "silu_and_multiply", build_launcher(tmp_path))
    monkeypatch.setattr(fallback.Triton, "is_used", True)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if has_compiler:
        compiler = tmp_path / "gcc"
        compiler.write_text("#!/bin/sh\nexit 1\n")
        compiler.chmod(0o755)
    with fake_cuda(), builders.two_layers():
        load_target(ON_GPU, "cuda:0")
    [record] = caplog.records
    assert record.getMessage().startswith("cuda:0 computes without Triton, which is slower: ")
    assert record.getMessage().endswith("(Debian, Ubuntu: apt install gcc python3-dev)")
    assert "\n" not in record.getMessage()


def test_a_model_that_does_not_fit_is_refused_before_any_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda() as gpus:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (10 * 10**9, 80 * 10**9))
        message = r"^device cuda:0: 10\.0 GB are free, and weights and the cache of one sequence need 16\.3 GB; "
        with pytest.raises(ConfigError, match=message):
            load_target(ON_GPU, "cuda:0")
        assert gpus.peak_bytes < 10**6


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float16"), ((8, 0), "bfloat16"), ((12, 0), "bfloat16")])
def test_a_gpu_without_bfloat16_computes_in_float16(
    capability: tuple[int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert fastest_dtype(torch.device("cuda:0")) == dtype


def full(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand a trace")


FULL = "device cpu: out of memory; a smaller model, or a lower max_model_len or max_num_seqs, needs less: CUDA out of"


def test_a_device_that_is_full_once_the_target_has_loaded_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "prepare", full)
    hardware = HardwareConfig(devices=("cpu", "cpu"), synthetic="smollm2-135m-slice")
    with pytest.raises(ConfigError, match=FULL):
        Engine.start(EngineConfig(hardware=hardware, drafters=()))


def test_a_gpu_computes_prompts_without_a_plan_for_each_length_and_sums_in_float32() -> None:
    matmul = torch.backends.cuda.matmul
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
    with fake_cuda():
        builders.target("cuda:0")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_fp16_reduced_precision_reduction


def test_a_drafter_whose_rows_read_features_starts_captured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny.save_checkpoint(tmp_path / "target", tiny.tiny_config(num_hidden_layers=6, tie_word_embeddings=False))
    with fake_cuda(values=True) as gpus:
        options = replace(OPTIONS, device="cuda:0", capture=capture_for("cuda:0", cuda_graphs=True))
        model = load_published(save_eagle3(tmp_path / "draft"), tmp_path / "target", options, "eagle")
        assert isinstance(model, ModelRunner)
        drafter = EagleDrafter(model)
        assert gpus.record.captures
    assert drafter.model.feature_width
    assert not caplog.records
