"""Which forward pass computes a model, what is refused, and how it is said: one line, before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from models import tiny

from amusd.config import EngineConfig, TargetConfig
from amusd.errors import ConfigError
from amusd.models.cached_model import CachedModel
from amusd.models.configuration import ModelConfig, load_config
from amusd.models.huggingface import load_model
from amusd.models.load_options import LoadOptions
from amusd.models.loading import check_target
from amusd.models.numerics import Numerics

RULE = Numerics(width=8, fixed=True)


def load(path: Path | str, max_model_len: int = 256, dtype: str = "float32") -> CachedModel:
    return load_model(path, LoadOptions(numerics=RULE, max_model_len=max_model_len, dtype=dtype))


def config_folder(folder: Path, config: Any) -> Path:
    config.save_pretrained(folder)
    return folder


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("MambaConfig", {}, "recurrent state"),
    ("Lfm2Config", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "conv layers"),
    ("MistralConfig", {"sliding_window": 128}, "window of 128.*at most 128"),
    ("Gemma3TextConfig", {"sliding_window": 128}, "window of 128.*at most 128"),
    ("T5Config", {}, "no causal language model"),
]


@pytest.mark.parametrize(("name", "options", "reason"), UNSUPPORTED, ids=[entry[0] for entry in UNSUPPORTED])
def test_what_cannot_roll_back_is_refused_by_name_from_its_configuration(
    name: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = getattr(transformers, name)(**options)
    with pytest.raises(ConfigError, match=f"'{config.model_type}' is not supported: .*{reason}") as caught:
        load(config_folder(tmp_path, config))
    assert "\n" not in str(caught.value)


def test_a_model_whose_code_cannot_compute_a_first_token_here_is_one_line(tmp_path: Path) -> None:
    """Nemotron's layers do not hand on what its attention is told."""
    tiny.save_checkpoint(tmp_path, transformers.NemotronConfig(**tiny._SIZES))
    with pytest.raises(
        ConfigError,
        match=r"transformers' code for it, without kernels from a hub, cannot compute a token: TypeError: .*",
    ) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_window_as_long_as_the_longest_sequence_is_accepted(tmp_path: Path) -> None:
    tiny.save_checkpoint(tmp_path, tiny.tiny_config("MistralConfig", sliding_window=256))
    assert load(tmp_path, max_model_len=256).max_length == 256
    with pytest.raises(ConfigError, match="window of 256"):
        load(tmp_path, max_model_len=257)


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    canary = tmp_path / "ran"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "payload.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "payload.Config", "AutoModelForCausalLM": "payload.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "payload", "auto_map": auto_map}))
    with pytest.raises(ConfigError, match="code of its own"):
        load(folder)
    assert not canary.exists()


def test_an_absent_device_is_one_line(tmp_path: Path) -> None:
    tiny.save_checkpoint(tmp_path, tiny.tiny_config())
    with pytest.raises(ConfigError, match="device cuda:99"):
        load_model(tmp_path, LoadOptions(numerics=RULE, max_model_len=64, dtype="float32", device="cuda:99"))


def test_loading_writes_nothing_to_stdout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny.save_checkpoint(tmp_path, tiny.tiny_config())
    capfd.readouterr()
    load(tmp_path)
    assert capfd.readouterr().out == ""


NOT_COVERED = {
    "another family": ("GemmaConfig", {}),
    "a quantized checkpoint": ("LlamaConfig", {"quantization_config": {"quant_method": "awq", "bits": 4}}),
    "another activation": ("LlamaConfig", {"hidden_act": "gelu"}),
    "another rope": ("LlamaConfig", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}),
}


@pytest.mark.parametrize(("name", "changes"), NOT_COVERED.values(), ids=NOT_COVERED)
def test_what_the_decoder_does_not_cover_is_left_to_transformers(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    tiny.tiny_config(name, **changes).save_pretrained(tmp_path)
    assert not isinstance(load_config(tmp_path), ModelConfig)
    with pytest.raises(ConfigError, match=r"model_impl=amusd: this model of type '.*' is not one that"):
        load_config(tmp_path, model_impl="amusd")


def test_auto_picks_the_decoder_where_it_covers_the_model_and_the_adapter_elsewhere(tmp_path: Path) -> None:
    found = []
    for name in ("LlamaConfig", "GemmaConfig"):
        tiny.save_checkpoint(tmp_path / name, tiny.tiny_config(name))
        found.append(load(tmp_path / name).implementation)
    assert found == ["amusd", "transformers"]


def test_what_cannot_run_is_refused_without_its_weights(tmp_path: Path) -> None:
    tiny.tiny_config("GemmaConfig").save_pretrained(tmp_path)  # a folder without weights
    model = {"kind": "hf", "model": str(tmp_path)}
    check_target(EngineConfig(target=TargetConfig(**model)), "cpu")
    with pytest.raises(ConfigError, match=r"model_impl=amusd: this model of type 'gemma'"):
        check_target(EngineConfig(target=TargetConfig(**model, model_impl="amusd")), "cpu")
