"""Which devices there are, and which one a worker works on. No GPU is needed: torch is made to count some."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lines import logged
from runtime.gpu_doubles import pretend_gpus

from amusd.commands.doctor import _machine
from amusd.config import DrafterConfig, EngineConfig, HardwareConfig, RunConfig, TargetConfig, TransportConfig
from amusd.drafters.factory import load_drafters
from amusd.engine import Engine
from amusd.errors import ConfigError
from amusd.runtime import draft_server
from amusd.runtime.cores import allowed_cores, pin_to
from amusd.runtime.devices import device_of, devices_of, warn_of_sharing, with_devices
from amusd.runtime.draft_process import DraftSource
from amusd.runtime.draft_server import load
from amusd.runtime.startup import load_first_rank
from amusd.tracing.recorder import Recorder


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are assigned on Linux alone")
def test_cores_that_a_process_may_not_use_leave_it_where_it_is() -> None:
    before = allowed_cores()
    pin_to({100_000})
    assert allowed_cores() == before


def on(*devices: str, **settings: Any) -> EngineConfig:
    return EngineConfig(hardware=HardwareConfig(devices=devices), **settings)


@pytest.mark.parametrize(
    ("num_gpus", "named", "size", "devices"),
    [
        (0, "", 1, "cpu cpu"),
        (1, "", 1, "cuda:0 cuda:0"),
        (8, "", 1, "cuda:0 cuda:1"),
        (2, "", 2, "cuda:0 cuda:1 cuda:1"),
        (2, "", 4, "cuda:0 cuda:0 cuda:1 cuda:1 cuda:1"),
        (8, "", 4, "cuda:0 cuda:1 cuda:2 cuda:3 cuda:4"),
        (2, "cpu cpu", 2, "cpu cpu cpu"),
        (2, "cuda:1", 2, "cuda:1 cuda:1 cuda:1"),
        (2, "cuda:1 cuda:0", 1, "cuda:1 cuda:0"),
    ],
)
def test_devices_are_those_that_were_named_or_else_the_gpus_there_are(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, named: str, size: int, devices: str
) -> None:
    """The target comes first, and the draft shares the last one."""
    pretend_gpus(monkeypatch, num_gpus)
    config = on(*named.split(), target_tensor_parallel_size=size)
    assert " ".join(devices_of(config)) == devices
    assert device_of(config, "target") == devices.split(maxsplit=1)[0]
    assert device_of(config, "draft") == devices.rsplit(maxsplit=1)[-1]


@pytest.mark.parametrize(
    ("num_gpus", "has_cuda", "reason"),
    [
        (2, True, "there is no cuda:3; allowed: cpu, cuda:0 to cuda:1"),
        (0, True, "torch finds no GPU; see what `nvidia-smi` lists"),
        (0, False, f"the installed torch ({torch.__version__}) is one for CPUs"),
    ],
)
def test_a_gpu_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, has_cuda: bool, reason: str
) -> None:
    pretend_gpus(monkeypatch, num_gpus, has_cuda=has_cuda)
    with pytest.raises(ConfigError) as caught:
        with_devices(on("cuda:0", "cuda:3"))
    assert str(caught.value).startswith(f"hardware.devices=['cuda:0', 'cuda:3']: {reason}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("named", ["", "cuda:0 cuda:1"])
@pytest.mark.parametrize(("kinds", "device"), [(["ngram"], "cpu"), (["ngram", "synthetic"], "cuda:1"), ([], "cpu")])
def test_a_draft_that_computes_nothing_opens_no_context_on_a_gpu(
    kinds: list[Any], device: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, 2)
    config = on(*named.split(), drafters=tuple(DrafterConfig(kind=kind) for kind in kinds))
    assert devices_of(config) == ("cuda:0", device)
    assert with_devices(config).devices == ("cuda:0", device)
    with logged() as lines:
        warn_of_sharing(config)
    assert not lines


SYNTHETIC, ELSEWHERE = DrafterConfig(kind="synthetic"), DrafterConfig(kind="hf", address="tcp://127.0.0.1:29501")


@pytest.mark.parametrize(
    ("num_gpus", "named", "size", "drafter", "shared"),
    [
        (1, "", 1, SYNTHETIC, "2 workers share cuda:0"),
        (2, "", 4, SYNTHETIC, "2 workers share cuda:0, 3 workers share cuda:1"),
        (1, "", 2, ELSEWHERE, "2 workers share cuda:0"),
        (2, "", 1, SYNTHETIC, None),
        (1, "cuda:0", 1, SYNTHETIC, None),
        (1, "", 1, ELSEWHERE, None),
        (0, "", 1, SYNTHETIC, None),
    ],
)
def test_workers_that_share_a_gpu_which_no_setting_named_are_a_warning(
    num_gpus: int, named: str, size: int, drafter: DrafterConfig, shared: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, num_gpus)
    with logged() as lines:
        warn_of_sharing(on(*named.split(), target_tensor_parallel_size=size, drafters=(drafter,)))
    assert lines == ([] if shared is None else [f"{shared}; each waits while the other computes (docs/one_gpu.md)"])


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("The NVIDIA driver on your system is too old (found version 11040).", "The NVIDIA driver on your system is"),
        ("CUDA error: out of memory\nCompile with", "out of memory; a smaller model, or a lower max_model_len or "),
        ("CUDA error: all CUDA-capable devices are busy or unavailable", "CUDA error: all CUDA-capable devices are "),
    ],
)
def test_a_gpu_that_cannot_be_claimed_is_one_line(error: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 4)
    for name in ("set_device", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, Mock(side_effect=RuntimeError(error)))
    config = on("cuda:2", "cuda:3")
    for start in (
        lambda: Engine.connect(config, None, Recorder("target")),
        lambda: load(config),
        lambda: [*_machine(config)],
    ):
        with pytest.raises(ConfigError, match=rf"^device cuda(:\d)?: {line}") as caught:
            start()
        assert "\n" not in str(caught.value)


class ClaimedError(Exception):
    """Raised where a worker has named its GPU, in place of its next step."""


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], object]:
    """Run a worker until it names its GPU, which must be its first use of CUDA; returns this device."""
    pretend_gpus(monkeypatch, 4)

    def claim(device: str) -> None:
        raise ClaimedError(device)

    monkeypatch.setattr(torch.cuda, "set_device", claim)

    def run(work: Callable[[], object]) -> object:
        with pytest.raises(ClaimedError) as caught:
            work()
        return caught.value.args[0]

    return run


def test_each_worker_names_its_gpu_before_it_does_anything_else_with_cuda(
    claims: Callable[[Callable[[], object]], object],
) -> None:
    config = on("cuda:2", "cuda:3")
    assert claims(lambda: Engine.connect(config, None, Recorder("target"))) == "cuda:2"
    assert claims(lambda: Engine.start(on("cuda:2", "cuda:3", drafters=()))) == "cuda:2"
    assert claims(lambda: load(config)) == "cuda:3"


@pytest.mark.parametrize(("fits_memory", "free", "length"), [(True, 0.5, 64), (True, 4.0, 256), (False, 0.5, 256)])
def test_the_drafts_caches_fit_into_half_of_the_free_memory_where_that_is_asked_for(
    small_models: Path, monkeypatch: pytest.MonkeyPatch, fits_memory: bool, free: float, length: int
) -> None:
    drafter = DrafterConfig(kind="hf", model=str(small_models / "draft"), dtype="float32")
    target = TargetConfig(kind="hf", model=str(small_models / "target"))
    sizes: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 3, "fits_memory": fits_memory}
    config = on("cpu", target=target, drafters=(drafter,), **sizes)
    [model] = load_drafters(config, "cpu").models
    monkeypatch.setattr(draft_server, "free_bytes", lambda _device: round(free * model.cache_bytes(3)))
    offer = load(config)
    assert [drafter.max_length for drafter in offer.drafters["hf"]] == [length] * 3
    lines = [note for note in offer.notes if "caches hold" in note]
    assert lines == ([f"its 3 caches hold {length} tokens each, in half of the free memory"] if length < 256 else [])
    inner = str(small_models / "draft")
    cascade = replace(config, drafters=(replace(drafter, kind="cascade", inner=inner),))
    lines = [note for note in load(cascade).notes if "caches hold" in note]
    halved = [f"its 3 caches hold {length // 2} tokens each, in half of the free memory"] * 2
    assert lines == (halved if length < 256 else [])


# What is refused or said before anything is loaded


def test_nccl_without_two_gpus_is_refused_before_a_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("amusd.runtime.draft_process.DraftProcess", lambda *_, **__: pytest.fail("it is started"))
    hardware = HardwareConfig(devices=("cuda:0", "cpu"))
    config = EngineConfig(transport=TransportConfig(kind="nccl"), hardware=hardware)
    with pytest.raises(ConfigError, match="the target is on cuda:0, the draft on cpu") as caught:
        DraftSource(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("length", "width"), [(63, None), (400, 408)])
def test_passes_of_many_rows_are_said_to_be_slow_on_a_cpu(
    length: int, width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("amusd.runtime.startup.load_target", lambda *_: None)
    monkeypatch.setattr("amusd.runtime.startup.use_huge_pages", lambda: None)
    hardware = HardwareConfig(devices=("cpu", "cpu"))
    config = RunConfig(mode="synchronous", num_speculative_tokens=length, hardware=hardware).engine_for("generate")
    with logged() as lines:
        load_first_rank(config, None)
    expected = f"each target pass computes max_verify_width={width} rows, which is slow on a CPU"
    assert lines == ([] if width is None else [expected])
