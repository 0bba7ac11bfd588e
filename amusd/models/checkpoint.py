"""The weights of a checkpoint in safetensors files, mapped into memory: a tensor is read where it is used.

Knows files, names and dtypes, and nothing of models. Whatever is wrong with a file is said in one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from amusd.errors import ConfigError
from amusd.models.checkpoint_folder import fetch_weights, find_checkpoint, first_line

_WEIGHTS = "model.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"


class Checkpoint:
    """Tensors by name. They and this object keep the files mapped."""

    def __init__(self, path: str | Path, files: Iterable[Path]) -> None:
        """`path`: what messages call it. Raises `ConfigError` for a file that is missing, cut short or no weights."""
        self.path = path
        self._file_of: dict[str, Any] = {}
        for file in files:
            opened = _open(path, file)
            self._file_of.update(dict.fromkeys(opened.keys(), opened))

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._file_of

    @property
    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._file_of)

    def dtype(self, name: str) -> str:
        """As the format calls it, `BF16` for instance. Reads no data."""
        return str(self._file_of[name].get_slice(name).get_dtype())

    def tensor(self, name: str) -> Tensor:
        """On the CPU, in the mapped file: never to be written to."""
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor


def open_checkpoint(path: str | Path) -> Checkpoint:
    """That in folder `path`, or under this name on the hub. Raises `ConfigError` if its files are not all there."""
    folder = find_checkpoint(path)
    names = _weight_files(path, folder)
    folder = fetch_weights(path, folder, names)
    if names == [_WEIGHTS] and not (folder / _WEIGHTS).exists():
        raise ConfigError(f"model {path}: no {_WEIGHTS} and no {_INDEX} in it{_other_weights(folder)}")
    return Checkpoint(path, [folder / name for name in names])


def _weight_files(path: str | Path, folder: Path) -> list[str]:
    """Names of the files with weights, whether or not they are there."""
    index = folder / _INDEX
    if (folder / _WEIGHTS).exists() or not index.exists():
        return [_WEIGHTS]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(f"{name}" for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model {path}: {_INDEX} is damaged: {first_line(error)}") from error


def _other_weights(folder: Path) -> str:
    """What can be done with the weights that a folder holds instead."""
    names = sorted(file.name for file in folder.iterdir())
    if "adapter_model.safetensors" in names:
        return "; it holds a LoRA adapter: put it into its base model with merge_and_unload() of peft, and save that"
    if others := [name for name in names if name.endswith((".bin", ".pt", ".pth"))]:
        return (
            f'; convert {others[0]}: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )
    if any(name.endswith(".gguf") for name in names):
        return "; GGUF files are not run: use the checkpoint in safetensors that they were made from"
    return ""


def _open(path: str | Path, file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    if not file.exists():
        raise ConfigError(f"model {path}: no {file.name}, which its index names")
    try:
        return safe_open(file, framework="pt")
    except OSError as error:
        raise ConfigError(f"model {path}: {file.name} cannot be read: {first_line(error)}") from error
    except SafetensorError as error:
        raise ConfigError(f"model {path}: {file.name} is damaged or cut short: {error}") from error
