"""`amusd doctor`: what it says about a pair on this machine, before anybody waits for an answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from models import tiny
from models.other_tokenizer import save_reindexed, word_tokenizer
from models.test_eagle import LAYERS, SIZES, eagle3_weights, save_speculators

from amusd.commands.doctor import Finding, _guard, _links, _machine, _models
from amusd.config import DrafterConfig, EngineConfig, HardwareConfig, TargetConfig, TransportConfig
from amusd.errors import ConfigError
from amusd.transport.latency import OneWayTime

pytestmark = pytest.mark.embedded


def looked_at(config: EngineConfig) -> dict[str, Finding]:
    return {finding.name: finding for finding in _guard("models", _models(config))}


@pytest.mark.parametrize("width", ["fixed", "bucketed"])
def test_it_says_what_is_loaded_whether_it_fits_and_whether_widths_show(width: Any, tmp_path: Path) -> None:
    tokenizer = tiny.byte_tokenizer()
    tiny.save_checkpoint(tmp_path, tiny.tiny_config(vocab_size=len(tokenizer)), tokenizer)
    checkpoint = {"kind": "hf", "model": str(tmp_path), "dtype": "float32"}
    found = looked_at(
        EngineConfig(
            target=TargetConfig(**checkpoint),
            drafters=(DrafterConfig(**checkpoint), DrafterConfig(kind="ngram")),
            verify_width=width,
            max_model_len=256,
        )
    )
    exactness = found.pop("exactness")
    assert all(finding.ok for finding in found.values()), found
    assert ", float32 on cpu, computed by amusd" in found["target"].text
    assert found["drafter"].text.endswith(" on cpu; ngram")
    assert " MB, caches (max_num_seqs) " in found["memory cpu"].text
    said = re.fullmatch(rf"(\d+) of \d+ rows have the same bits in any batch \(verify_width={width}\)", exactness.text)
    assert said
    assert exactness.ok is (True if width == "fixed" else None)  # at changing widths it only tells what it measured
    assert width != "fixed" or exactness.text.startswith(f"{said[1]} of {said[1]} ")


def test_caches_that_do_not_fit_beside_the_weights_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny.byte_tokenizer()
    size = {"vocab_size": len(tokenizer)}
    tiny.save_checkpoint(tmp_path / "target", tiny.tiny_config(num_hidden_layers=LAYERS, **size), tokenizer)
    weights = eagle3_weights("layers.0")
    del weights["t2d"]
    save_speculators(tmp_path / "eagle", weights, transformer_layer_config={**SIZES, **size, "head_dim": 8})
    config = EngineConfig(
        target=TargetConfig(kind="hf", model=str(tmp_path / "target"), dtype="float32"),
        drafters=(DrafterConfig(kind="eagle", model=str(tmp_path / "eagle"), dtype="float32"),),
        max_model_len=256,
    )
    assert looked_at(config)["memory cpu"].ok
    monkeypatch.setattr("amusd.commands.doctor.free_bytes", lambda _device: 1_000_000)
    memory = looked_at(config)["memory cpu"]
    assert not memory.ok
    assert memory.text.endswith(" of 1 free MB")


RANKS = "each rank needs a key head, and this model has 3; allowed: 1 to 3"


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"target": TargetConfig(model_impl="amusd")}, "model_impl=amusd: model type 'llama': a reason"),
        ({"target_tensor_parallel_size": 4}, f"target_tensor_parallel_size=4: {RANKS}"),
    ],
)
def test_what_cannot_run_is_refused_before_weights_are_read(
    keys: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "target" in keys:
        monkeypatch.setattr("amusd.models.load_options.why_not_covered", lambda _config: "a reason")
    monkeypatch.setattr("amusd.commands.doctor.load_target", lambda *_arguments: pytest.fail("weights are read"))
    assert looked_at(EngineConfig(**keys)) == {"models": Finding("models", False, text)}


def test_it_says_how_much_of_the_vocabulary_a_draft_with_another_tokenizer_can_propose(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    tiny.save_checkpoint(tmp_path / "target", tiny.tiny_config(vocab_size=len(tokenizer)), tokenizer)
    for name, num_kept in (("near", 320), ("far", 100)):
        save_reindexed(tmp_path / "target", tmp_path / name, keep=lambda token_id: token_id < num_kept)  # noqa: B023
    target = TargetConfig(kind="hf", model=str(tmp_path / "target"))
    near, far = (
        looked_at(EngineConfig(target=target, drafters=(DrafterConfig(kind="hf", model=str(tmp_path / name)),)))
        for name in ("near", "far")
    )
    assert near["drafter"].ok
    assert "its tokenizer differs from the target's: it can propose 320 of 340 token ids" in near["drafter"].text
    assert far["models"].ok is False
    assert "it can propose 100 of 340 token ids" in far["models"].text


@pytest.mark.parametrize("wanted", ["auto", "gloo", "nccl"])
def test_a_link_that_does_not_work_is_only_wrong_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, wanted: Any
) -> None:
    def measure(link: TransportConfig, **_orders: object) -> OneWayTime:
        if link.kind in ("gloo", "nccl"):
            raise ConfigError("a reason")
        return OneWayTime(p50_us=12.3, p99_us=45.6)

    monkeypatch.setattr("amusd.commands.doctor.measure_one_way", measure)
    monkeypatch.setattr("amusd.commands.doctor.choose_here", lambda *_: "zeromq")
    found = {finding.name: finding for finding in _links(EngineConfig(transport=TransportConfig(kind=wanted)))}
    assert {name: finding.ok for name, finding in found.items()} == {
        "link shared_memory": True,
        "link zeromq": True,
        "link zeromq_tcp": True,
        "link gloo": False if wanted == "gloo" else None,
        "link nccl": False if wanted == "nccl" else None,
        "transport": True,
    }
    assert found["transport"].text == "zeromq"
    assert found["link nccl"].text == "a reason"
    assert found["link zeromq"].text.startswith("12 us one way")


@pytest.mark.parametrize(
    ("devices", "ok", "end"),
    [
        (("cuda:0", "cuda:1"), True, "rank 0 of the target on cuda:0, the draft on cuda:1"),
        (("cuda:0", "cuda:0"), None, "target and draft share cuda:0: they slow each other"),
        (("cpu", "cpu"), None, "too few cores for all: they slow each other"),
    ],
)
def test_it_says_where_both_are_and_whether_they_share(
    devices: tuple[str, ...], ok: bool | None, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _number: "H100")
    monkeypatch.setattr("amusd.commands.doctor.allowed_cores", lambda: [3])
    *_, found = _machine(EngineConfig(hardware=HardwareConfig(devices=devices)))
    assert (found.name, found.ok) == ("devices", ok)
    assert found.text.startswith("GPUs: H100, H100; 1 CPU cores; ")
    assert found.text.endswith(end)
