"""`amusd doctor`: what it says about a pair on this machine, before anybody waits for an answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from models import tiny

from amusd.commands.doctor import Finding, _guard, _links, _models
from amusd.config import DrafterConfig, EngineConfig, TargetConfig, TransportConfig
from amusd.errors import ConfigError

pytestmark = pytest.mark.embedded


def looked_at(config: EngineConfig) -> dict[str, Finding]:
    return {finding.name: finding for finding in _guard("models", _models(config))}


@pytest.mark.parametrize("width", ["fixed", "bucketed"])
def test_it_says_what_is_loaded_whether_it_fits_and_whether_widths_show(
    width: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny.byte_tokenizer()
    tiny.save_checkpoint(tmp_path, tiny.tiny_config(vocab_size=len(tokenizer)), tokenizer)
    checkpoint = {"kind": "hf", "model": str(tmp_path), "dtype": "float32"}
    config = EngineConfig(
        target=TargetConfig(**checkpoint),
        drafters=(DrafterConfig(**checkpoint), DrafterConfig(kind="ngram")),
        verify_width=width,
        max_model_len=256,
    )
    found = looked_at(config)
    exactness = found.pop("exactness")
    assert all(finding.ok for finding in found.values()), found
    assert ", float32 on cpu, computed by amusd" in found["target"].text
    assert found["drafter"].text.endswith(" on cpu; ngram")
    assert " MB, caches (max_num_seqs) " in found["memory cpu"].text
    said = re.fullmatch(rf"(\d+) of \d+ rows have the same bits in any batch \(verify_width={width}\)", exactness.text)
    assert said
    assert exactness.ok is (True if width == "fixed" else None)  # at changing widths it only tells what it measured
    assert width != "fixed" or exactness.text.startswith(f"{said[1]} of {said[1]} ")
    monkeypatch.setattr("amusd.commands.doctor.free_bytes", lambda _device: 1_000)
    assert looked_at(config)["memory cpu"].ok is False


def test_a_wrong_drafter_is_told_before_the_targets_weights_are_read(tmp_path: Path) -> None:
    tokenizer = tiny.byte_tokenizer()
    tiny.save_checkpoint(tmp_path, tiny.tiny_config(vocab_size=len(tokenizer)), tokenizer)
    (tmp_path / "model.safetensors").unlink()
    wrong = DrafterConfig(kind="hf", model=str(tmp_path / "nothing"))
    found = looked_at(EngineConfig(target=TargetConfig(kind="hf", model=str(tmp_path)), drafters=(wrong,)))
    assert found["models"] == Finding("models", False, f"model {wrong.model}: no such folder")


@pytest.mark.parametrize("wanted", ["auto", "gloo"])
def test_a_link_that_does_not_work_is_only_wrong_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, wanted: Any
) -> None:
    def measure(link: TransportConfig, **_orders: object) -> tuple[float, float]:
        if link.kind in ("gloo", "nccl"):
            raise ConfigError("a reason")
        return 12.3, 45.6

    monkeypatch.setattr("amusd.commands.bench.measure_one_way", measure)
    found = {finding.name: finding for finding in _links(EngineConfig(transport=TransportConfig(kind=wanted)))}
    assert {name: finding.ok for name, finding in found.items()} == {
        "link shared_memory": True,
        "link zeromq": True,
        "link zeromq_tcp": True,
        "link gloo": False if wanted == "gloo" else None,
        "link nccl": None,
        "transport": True,
    }
    assert found["transport"].text.startswith({"auto": "shm://", "gloo": "gloo://"}[wanted])
    assert found["link nccl"].text == "a reason"
    assert found["link zeromq"].text.startswith("12 us one way")
