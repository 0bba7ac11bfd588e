"""A checkpoint: a folder or the hub's cache of it, with weights in safetensors files."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amusd.errors import AmusdError, ConfigError, first_line
from amusd.files import CHECKPOINT, CONFIG_JSON, check_checkpoint

_WEIGHTS = "model.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"
DRAFTER_FILES = ("medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
"""Files of published drafters, besides those of models; the last two are pickles."""
_TEXTS = ("*.json", "*.jinja")


def open_checkpoint(path: str | Path, others: Sequence[str] = ()) -> dict[str, Tensor]:
    """Tensors of a folder or hub name, on the CPU in mapped files that must not be written to.

    `others`: files to read instead of absent safetensors files. Raises `ConfigError` if a file is missing, damaged or a
    pickle with more than tensors, or if two files hold the same tensor.
    """
    folder = find_checkpoint(path)
    is_local = folder == Path(path).expanduser()
    for names in (_weight_files(path, folder), *([name] for name in others)):
        if not is_local and not all((folder / name).exists() for name in names):
            folder = _download(str(path), *names)
        if names[0] not in (_WEIGHTS, *others) or (folder / names[0]).exists():  # files of an index must exist
            weights = dict[str, Tensor]()
            for tensors in [_read(path, folder / name) for name in names]:
                if twice := weights.keys() & tensors.keys():
                    raise ConfigError(f"model {path}: {min(twice)} is in two of its files; allowed: one")
                weights |= tensors
            return weights
    raise ConfigError(f"model {path}: none of {', '.join((_WEIGHTS, _INDEX, *others))} in it; {CHECKPOINT}")


def refuse_unread(path: str | Path, names: Iterable[str], read: Iterable[str]) -> None:
    """Raise `ConfigError` if only a part of a layer in a file is `read`, for instance its weight without its bias.

    Whole layers, heads of another task and stored rotary angles may stay unread. `names`: tensors in the file.
    """
    read = {*read}
    modules = {name.rsplit(".", count)[0] for name in read for count in (1, 2)}
    unread = {name for name in names if name not in read and "rotary_emb." not in name}
    if found := [name for name in unread if any(name.rsplit(".", count)[0] in modules for count in (1, 2))]:
        raise ConfigError(f"model {path}: its file has {min(found)}, unknown to config.json: check model_type, *_bias")


def write_checkpoint(folder: Path, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write `config.json` and the weights, shared tensors once. Raises `OSError`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    names = {id(tensor): name for name, tensor in reversed(list(weights.items()))}
    stored = {name: weights[name].contiguous() for name in names.values()}
    try:
        save_file(stored, folder / _WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # also for a full disk
        raise OSError(str(error)) from error
    (folder / CONFIG_JSON).write_text(json.dumps(dict(settings), indent=2), encoding="utf-8")


def read_json(path: str | Path, folder: Path, name: str) -> dict[str, Any]:
    """Read a JSON file of a checkpoint folder. Raises `ConfigError`."""
    with one_line_errors(path, name):
        return dict(json.loads((folder / name).read_text(encoding="utf-8")))


def _weight_files(path: str | Path, folder: Path) -> list[str]:
    if (folder / _WEIGHTS).exists() or not (folder / _INDEX).exists():
        return [_WEIGHTS]
    index = read_json(path, folder, _INDEX)
    with one_line_errors(path, _INDEX):
        names = sorted({f"{name}" for name in index["weight_map"].values()})
    others = [name for name in names if not name.endswith(".safetensors")]
    if others or not names:
        raise ConfigError(f"model {path}: {_INDEX} names {others[0] if others else 'no file'}; allowed: *.safetensors")
    return names


def _read(path: str | Path, file: Path) -> dict[str, Tensor]:
    from safetensors import safe_open

    if file.suffix == ".safetensors":
        with one_line_errors(path, file.name), safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return {f"{name}": tensor.detach() for name, tensor in loaded.items()}
    except Exception as error:  # torch's message tells how to run the pickle's code
        raise ConfigError(f"model {path}: {file.name} is damaged or holds more than tensors; not run") from error


def find_checkpoint(path: str | Path, *needed: str) -> Path:
    """The folder `path`, or the hub's cached folder of that name, perhaps without weights.

    Raises `ConfigError` if there is none, or it lacks `config.json` or a `needed` file.
    """
    check_checkpoint(path, CONFIG_JSON, *needed)
    if not (folder := Path(path).expanduser()).is_dir():
        folder = _download(str(path), *_TEXTS)
        check_checkpoint(path, CONFIG_JSON, *needed, folder=folder)
    return folder


@functools.cache
def _download(name: str, *patterns: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    with one_line_errors(name):
        try:
            return Path(snapshot_download(name, allow_patterns=[*patterns], ignore_patterns=["*/*"]))
        except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError) as error:
            raise ConfigError(
                f"model {name}: no such folder, and the hub does not give it ({first_line(error.__cause__ or error)}); "
                "name a folder, or run `hf auth login` for a gated model, or "
                f"`hf download {name}` where there is a network, copy the cache here and set HF_HUB_OFFLINE=1"
            ) from error


@contextlib.contextmanager
def one_line_errors(path: str | Path, part: str = "cannot be loaded") -> Iterator[None]:
    """Turn library errors for a damaged or foreign checkpoint into a `ConfigError` of one line.

    `part`: the file that is read, or what fails.
    """
    try:
        yield
    except AmusdError:
        raise
    except Exception as error:  # libraries raise every kind, even plain Exception
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            raise ConfigError(f"model {path}: it needs code of its own, which is never run") from error
        raise ConfigError(f"model {path}: {part}: {first_line(error)}") from error
