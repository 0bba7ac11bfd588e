"""What is refused before anything is loaded."""

from __future__ import annotations

import pytest

from amusd.config import EngineConfig, HardwareConfig, TransportConfig
from amusd.errors import ConfigError
from amusd.models.language_model import LanguageModel
from amusd.models.tokenizer import Tokenizer
from amusd.runtime.startup import connect_target, link_devices
from amusd.tracing.recorder import Recorder
from amusd.transport.base import Rendezvous


def load() -> tuple[LanguageModel, Tokenizer]:
    raise AssertionError("weights are loaded")


def publish(_rendezvous: Rendezvous) -> None:
    raise AssertionError("the draft is told where to connect")


def test_nccl_without_two_gpus_is_refused_before_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    hardware = HardwareConfig(devices=("cuda:0", "cpu"))
    config = EngineConfig(transport=TransportConfig(kind="nccl"), hardware=hardware)
    assert link_devices(config) == ("cuda:0", "cpu")
    with pytest.raises(ConfigError, match="the target is on cuda:0, the draft on cpu") as caught:
        connect_target(config, load, publish, Recorder("target"))
    assert "\n" not in str(caught.value)
