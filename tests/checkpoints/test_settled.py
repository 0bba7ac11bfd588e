"""A CPU's dtype for the target is timed once, kept, and the same for every later process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lines import logged
from models.recurrent_models import config_of
from models.tiny import tiny_causal_lm, tiny_config, weights_of

from amusd.checkpoints import settled
from amusd.checkpoints.checkpoint import write_checkpoint
from amusd.checkpoints.loading import is_fixed
from amusd.checkpoints.settled import quickest_dtype, settle, settle_dtype
from amusd.config import EngineConfig, HardwareConfig, TargetConfig
from amusd.errors import ConfigError
from amusd.models import linear

AUTO = EngineConfig()


def dtype_of(cache: Path, config: EngineConfig = AUTO, device: str = "cpu") -> str:
    return settle_dtype(config, device, cache).target.dtype


def test_the_first_choice_is_kept_whatever_later_timings_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter(("float32", "bfloat16"))
    monkeypatch.setattr(settled, "quickest_dtype", lambda *_: next(found))
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)  # wherever it is started
        assert dtype_of(tmp_path / "cache") == "float32"
    [kept] = (tmp_path / "cache").iterdir()
    assert settled._keep(kept, "bfloat16") == "float32"  # another process was first
    kept.write_text("{")  # damaged: timed again, for this process
    assert dtype_of(tmp_path / "cache") == "bfloat16"


def test_a_folder_that_cannot_be_written_costs_the_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settled, "quickest_dtype", lambda *_: "float32")
    (tmp_path / "file").touch()
    assert dtype_of(tmp_path / "file" / "cache") == "float32"


@pytest.mark.parametrize(
    ("config", "device"),
    [
        (AUTO, "cuda:0"),
        (EngineConfig(target=TargetConfig(dtype="bfloat16")), "cpu"),
        (EngineConfig(target=TargetConfig(model_impl="transformers")), "cpu"),
        (EngineConfig(target_tensor_parallel_size=2), "cpu"),
        (EngineConfig(hardware=HardwareConfig(synthetic="llama-1b"), drafters=()), "cpu"),
    ],
)
def test_nothing_is_timed_where_the_dtype_is_named_or_known(tmp_path: Path, config: EngineConfig, device: str) -> None:
    assert dtype_of(tmp_path, config, device) == config.target.dtype
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("seconds", "expected"), [(0.8, "float32"), (0.95, "bfloat16"), (2.0, "bfloat16")])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_float32_has_to_be_clearly_quicker_and_float16_to_hold_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, expected: str, stored: torch.dtype
) -> None:
    model = tiny_causal_lm(tiny_config())
    write_checkpoint(tmp_path, {}, {name: weight.to(stored) for name, weight in weights_of(model).items()})
    monkeypatch.setattr(linear, "can_multiply_bfloat16", lambda: True)
    monkeypatch.setattr(linear, "can_pack", lambda *_: False)  # nor does this CPU have to
    model_config = TargetConfig(kind="hf", model=str(tmp_path))
    assert quickest_dtype(model_config, 1) is None  # it fits in a cache
    monkeypatch.setattr(settled, "_LEAST_BYTES", 0)
    monkeypatch.setattr(settled, "_seconds_of", lambda _, rows: seconds if rows[0].dtype is torch.float32 else 1.0)
    assert quickest_dtype(model_config, 1) == (expected if stored is torch.bfloat16 else "bfloat16")


@pytest.mark.parametrize("content", [None, b"\xff\xfe{", b"[]", b'{"model_type": ["llama"]}'])
def test_a_configuration_that_cannot_be_read_is_one_line(content: bytes | None, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {}, weights_of(tiny_causal_lm(tiny_config())))
    file = tmp_path / "config.json"
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^model {tmp_path}: .*config\.json.+$"):
        settle(EngineConfig(target=TargetConfig(kind="hf", model=str(tmp_path))), "cpu")


SETTLED = {
    "dense": (tiny_config(), "fixed", []),
    "computed by transformers": (tiny_config("GemmaConfig"), "fixed", []),
    "experts": (tiny_config("Qwen3MoeConfig"), "bucketed", ["the target is a mixture of experts"]),
    "recurrent": (config_of("lfm2"), "bucketed", ["the target has recurrent states"]),
}


@pytest.mark.parametrize("name", SETTLED)
def test_passes_are_padded_only_where_that_keeps_bits(name: str, tmp_path: Path) -> None:
    model_config, width, reasons = SETTLED[name]
    model_config.save_pretrained(tmp_path)
    config = EngineConfig(target=TargetConfig(kind="hf", model=str(tmp_path), dtype="float32"))
    with logged() as lines:
        assert settle(config, "cpu").verify_width == width
    assert [line.split(",")[0] for line in lines] == [f"verify_width=bucketed: {reason}" for reason in reasons]
    assert is_fixed(config) is (width == "fixed"), "also where nobody has settled it"
