"""`amusd doctor`: its report about a pair on this machine, before any answer."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import tiny

from amusd.checkpoints.loading import load_target
from amusd.commands.doctor import _findings, _guard, _links, _models, _passes, _windows
from amusd.commands.other_worker import LONG, measure_one_way
from amusd.config import DrafterConfig, EngineConfig, HardwareConfig, TargetConfig, TransportConfig
from amusd.errors import ConfigError
from amusd.models.kv_cache import KVCache
from amusd.protocol.messages import Message
from amusd.protocol.wire import encode
from amusd.runner.model_runner import ModelRunner

pytestmark = pytest.mark.embedded


def looked_at(config: EngineConfig) -> dict[str, tuple[bool | None, str]]:
    return {name: (ok, text) for name, ok, text in _guard("models", _models(config))}


@pytest.mark.parametrize("width", ["fixed", "bucketed"])
def test_the_doctor_says_what_is_loaded_whether_it_fits_and_whether_widths_show(
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
        max_num_seqs=5,
    )
    numbers, new_caches = set[int](), ModelRunner.new_caches

    def counted(self: ModelRunner, number: int, *args: Any, **options: Any) -> list[KVCache]:
        numbers.add(number)
        return new_caches(self, number, *args, **options)

    monkeypatch.setattr(ModelRunner, "new_caches", counted)
    found = looked_at(config)
    assert numbers == {1, 5}, "the size of caches, and what the engine has: a GPU computes rows for all of them"
    exactness, rows, neighbour = (found.pop(name) for name in ("exactness", "rows", "neighbour"))
    assert re.match(r"a pass of 1, 2, 8 rows takes [\d.]+, [\d.]+, [\d.]+ ms", rows[1])
    said = r"a pass takes [\d.]+ ms, and [\d.]+ while the draft's device computes: running ahead (costs|gains) .*"
    assert re.fullmatch(said, neighbour[1])
    assert all(ok for ok, _ in found.values()), found
    assert ", float32 on cpu, computed by amusd" in found["target"][1]
    assert found["drafter"][1].endswith(" on cpu; ngram")
    assert " MB, caches (max_num_seqs) " in found["memory cpu"][1]
    counted_rows = re.fullmatch(
        rf"(\d+) of \d+ rows have the same bits in any batch \(verify_width={width}\)", exactness[1]
    )
    assert counted_rows
    assert exactness[0] is (True if width == "fixed" else None)  # at changing widths it only tells what it measured
    assert width != "fixed" or exactness[1].startswith(f"{counted_rows[1]} of {counted_rows[1]} ")
    monkeypatch.setattr("amusd.commands.doctor.free_bytes", lambda _device: 1_000)
    assert looked_at(config)["memory cpu"][0] is False


def test_wide_passes_are_timed_and_a_context_that_is_too_short_for_that_is_told(tmp_path: Path) -> None:
    tokenizer = tiny.byte_tokenizer()
    tiny.save_checkpoint(tmp_path, tiny.tiny_config(vocab_size=len(tokenizer)), tokenizer)
    target = TargetConfig(kind="hf", model=str(tmp_path), dtype="float32")
    config = EngineConfig(
        target=target, drafters=(DrafterConfig(kind="ngram"),), max_model_len=256, max_verify_width=64
    )
    assert looked_at(config)["rows"][1].startswith("a pass of 1, 2, 64 rows takes ")
    ok, text = looked_at(replace(config, max_model_len=100))["exactness"]
    assert ok is None
    assert re.fullmatch(r"not measured: needs room for \d+ tokens \(max_model_len\)", text)


def test_the_doctor_says_what_the_positions_outside_of_windows_cost(tmp_path: Path) -> None:
    tokenizer = tiny.byte_tokenizer()
    config = tiny.tiny_config("MinistralConfig", vocab_size=len(tokenizer), sliding_window=64)
    tiny.save_checkpoint(tmp_path, config, tokenizer)
    engine = EngineConfig(
        target=TargetConfig(kind="hf", model=str(tmp_path)),
        max_model_len=256,
        max_num_seqs=500,
        verify_width="bucketed",
    )
    megabytes = round(500 * 192 * 2 * 2 * 16 * 4 / 1e6)  # tokens of one layer; keys and values; heads; float32
    [finding] = _windows(engine, load_target(engine, "cpu")[0])
    need = f"about {megabytes} MB more than these layers need"
    assert finding == ("windows", None, f"1 of 2 layers see 64 of 256 tokens; caches keep all, {need}")


@pytest.mark.parametrize(
    ("two_ms", "said"), [(1.3, None), (1.4, "two rows take 1.4 times one, so wrong candidates cost")]
)
def test_rows_that_cost_time_are_told(two_ms: float, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"1": 1.0, "2": two_ms, "8": 5.0}
    monkeypatch.setattr("amusd.commands.doctor.one_pass", lambda *_: None)
    monkeypatch.setattr("amusd.commands.doctor.time_in_turns", lambda *_: [times, times])
    (_, ok, text), _ = _passes(EngineConfig(), None, ())  # type: ignore[arg-type]
    assert text.endswith(said or " 5.0 ms")
    assert ok is (True if said is None else None)


def test_a_wrong_drafter_is_told_before_the_targets_weights_are_read(tmp_path: Path) -> None:
    tokenizer = tiny.byte_tokenizer()
    tiny.save_checkpoint(tmp_path, tiny.tiny_config(vocab_size=len(tokenizer)), tokenizer)
    (tmp_path / "model.safetensors").unlink()
    wrong = DrafterConfig(kind="hf", model=str(tmp_path / "nothing"))
    found = looked_at(EngineConfig(target=TargetConfig(kind="hf", model=str(tmp_path)), drafters=(wrong,)))
    assert found["models"] == (False, f"model {wrong.model}: no such folder")


def test_what_crosses_from_gpu_to_gpu_is_measured_by_a_long_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(_link: TransportConfig, message: Message | None = None, **_orders: object) -> tuple[float, float]:
        return (12.3, 45.6) if message is None else (round(len(encode(message, 0)) / 1000), 0.0)

    monkeypatch.setattr("amusd.commands.bench.measure_one_way", measure)
    found = {name: text for name, _, text in _links(EngineConfig())}
    assert found["link nccl"].endswith("46 us at the 99th percentile; 66 us for 64 KiB from GPU to GPU")
    assert "KiB" not in found["link zeromq"]


def test_a_long_message_is_answered_by_the_same() -> None:
    assert measure_one_way(TransportConfig(kind="zeromq"), num_messages=2, message=LONG)[0] > 0


def test_what_needs_no_device_is_told_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amusd.commands.doctor._links", lambda _config: iter([("transport", True, "")]))
    monkeypatch.setattr("amusd.runtime.devices.count_gpus", lambda: 0)
    hardware = HardwareConfig(devices=("cuda:0", "cuda:1"))
    found = [(name, ok) for name, ok, _ in _findings(EngineConfig(hardware=hardware))]
    assert found == [("versions", None), ("devices", False), ("transport", True), ("models", None)]


@pytest.mark.parametrize("wanted", ["auto", "gloo"])
def test_a_link_that_does_not_work_is_only_wrong_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, wanted: Any
) -> None:
    def measure(link: TransportConfig, **_orders: object) -> tuple[float, float]:
        if link.kind in ("gloo", "nccl"):
            raise ConfigError("a reason")
        return 12.3, 45.6

    monkeypatch.setattr("amusd.commands.bench.measure_one_way", measure)
    links = _links(EngineConfig(transport=TransportConfig(kind=wanted)))
    found = {name: (ok, text) for name, ok, text in links}
    assert {name: ok for name, (ok, _) in found.items()} == {
        "link shared_memory": True,
        "link zeromq": True,
        "link zeromq_tcp": True,
        "link gloo": False if wanted == "gloo" else None,
        "link nccl": None,
        "transport": True,
    }
    assert found["transport"][1].startswith({"auto": "shm://", "gloo": "gloo://"}[wanted])
    assert found["link nccl"][1] == "a reason"
    assert found["link zeromq"][1].startswith("12 us one way")
