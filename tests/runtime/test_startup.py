"""What is refused or said before anything is loaded."""

from __future__ import annotations

import pytest
from lines import logged

from amusd.config import EngineConfig, HardwareConfig, RunConfig, TransportConfig
from amusd.errors import ConfigError
from amusd.runtime.draft_process import DraftSource
from amusd.runtime.startup import load_first_rank


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
