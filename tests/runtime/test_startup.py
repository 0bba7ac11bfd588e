"""What is refused before anything is loaded, and what a target raises where its draft ends."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from lines import logged
from memory_link import memory_pair

from amusd.checkpoints.tokenizer import Tokenizer
from amusd.config import EngineConfig, HardwareConfig, RunConfig, TransportConfig
from amusd.errors import ConfigError, PeerError
from amusd.protocol.messages import Hello
from amusd.runner.model_runner import ModelRunner
from amusd.runtime.devices import link_devices
from amusd.runtime.handshake import await_hello, failure_report
from amusd.runtime.startup import connect_target, load_with_followers
from amusd.tracing.recorder import Recorder


def load(*_: object) -> tuple[ModelRunner, Tokenizer]:
    raise AssertionError("weights are loaded")


def publish(*_orders: object) -> None:
    raise AssertionError("the draft is told where to connect")


def test_nccl_without_two_gpus_is_refused_before_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("amusd.runtime.startup.claim_device", lambda *_: "cuda:0")
    monkeypatch.setattr("amusd.runtime.startup.load_with_followers", load)
    hardware = HardwareConfig(devices=("cuda:0", "cpu"))
    config = EngineConfig(transport=TransportConfig(kind="nccl"), hardware=hardware)
    assert link_devices(config) == ("cuda:0", "cpu")
    drafts = SimpleNamespace(tell=publish, stop=lambda: None)
    with pytest.raises(ConfigError, match="the target is on cuda:0, the draft on cpu") as caught:
        connect_target(config, drafts, Recorder("target"), ExitStack())
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
        load_with_followers(config, None)
    expected = f"each target pass computes max_verify_width={width} rows, which is slow on a CPU"
    assert lines == ([] if width is None else [expected])


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ConfigError("model /m: quantized with AWQ"), ConfigError, r"^model /m: quantized with AWQ$"),
        (ConfigError("model /\udcff: no such folder"), ConfigError, r"^model /\?: no such folder$"),
        (MemoryError("a bug"), PeerError, r"MemoryError: a bug$"),
    ],
)
def test_what_a_draft_says_of_its_end_is_what_the_target_raises(error: Exception, kind: type, text: str) -> None:
    here, there = memory_pair()
    there.send(failure_report(error))
    with pytest.raises(kind, match=text) as caught:
        await_hello(here, Hello(0, "", ()), 60.0)
    assert type(caught.value) is kind
