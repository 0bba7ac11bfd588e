"""A checkpoint: the folder that the user names, or the model hub's cache of it, and its weights in safetensors files.

What cannot be loaded is refused in one line, with the reason of the library that reads it. Weights are mapped into
memory: a tensor is read where it is used.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amusd.errors import AmusdError, ConfigError, UnsupportedModelError, first_line

CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"
_HEADS = ("medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
"""Files in which drafters are published beside those of any model; the last two are pickles."""
_TEXTS = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
"""Files of a hub repository that say how to use its weights."""
_NEEDED = "a checkpoint is config.json, *.safetensors and a tokenizer; convert adapters, GGUF and pickles to that"


def open_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a folder or hub name, on the CPU in its mapped files: they must not be written to.

    Raises `ConfigError` if a file is missing or damaged.
    """
    folder = find_checkpoint(path)
    names = _weight_files(path, folder)
    is_local = folder == Path(path).expanduser()
    if not is_local and not all((folder / name).exists() for name in names):
        folder = _download(str(path), names)
    if names == [_WEIGHTS] and not (folder / _WEIGHTS).exists():
        raise ConfigError(f"model {path}: no {_WEIGHTS} and no {_INDEX} in it; {_NEEDED}")
    return _tensors(path, [folder / name for name in names])


def write_checkpoint(folder: Path, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write `config.json` and the weights, a tensor with two names once. Raises `OSError`."""
    from safetensors.torch import save_file

    names = {id(tensor): name for name, tensor in reversed(list(weights.items()))}
    stored = {name: weights[name].contiguous() for name in names.values()}
    save_file(stored, folder / _WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(dict(settings), indent=2), encoding="utf-8")


def read_head(path: str | Path) -> Mapping[str, Tensor]:
    """The tensors of a published drafter by name, on the CPU: a folder or hub name. They must not be written to.

    Other than a model it may be in a pickle, of which tensors alone are read. Raises `ConfigError` if no file is there,
    or one is damaged or holds more than tensors.
    """
    folder = find_checkpoint(path)
    is_local = folder == Path(path).expanduser()
    for names in (_weight_files(path, folder), *([name] for name in _HEADS)):
        if not is_local and not all((folder / name).exists() for name in names):
            folder = _download(str(path), names)
        files = [folder / name for name in names]
        if not all(file.exists() for file in files):
            continue
        if files[0].suffix != ".safetensors":
            return _unpickle(path, files[0])
        return _tensors(path, files)
    raise ConfigError(f"model {path}: no weights of a drafter in it: {', '.join((_WEIGHTS, *_HEADS))}")


def _unpickle(path: str | Path, file: Path) -> Mapping[str, Tensor]:
    """The tensors of a pickle, mapped into memory; whatever else it holds is never run."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return {f"{name}": tensor.detach() for name, tensor in loaded.items()}
    except Exception as error:  # whose own message tells how to run what is in it
        raise ConfigError(
            f"model {path}: {file.name} is damaged or holds more than tensors, which is never run"
        ) from error


def _weight_files(path: str | Path, folder: Path) -> list[str]:
    """Names of the files with weights, whether or not they are there."""
    index = folder / _INDEX
    if (folder / _WEIGHTS).exists() or not index.exists():
        return [_WEIGHTS]
    with one_line_errors(path, _INDEX):
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(f"{name}" for name in names)


def _tensors(path: str | Path, files: Iterable[Path]) -> dict[str, Tensor]:
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    for file in files:
        with one_line_errors(path, file.name), safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    return tensors


def find_checkpoint(path: str | Path) -> Path:
    """The folder `path`, or the cached one of the hub's model of this name, where weights may still be missing.

    Raises `ConfigError` if there is none, or it holds no checkpoint.
    """
    with one_line_errors(path):
        folder = Path(path).expanduser()
        if folder.is_file():
            raise ConfigError(f"model {path}: a file, no folder; {_NEEDED}")
        if not folder.is_dir():
            folder = _from_hub(str(path))
        if not (folder / CONFIG).is_file():
            raise ConfigError(f"model {path}: no {CONFIG} in it; {_NEEDED}")
    return folder


@functools.cache
def _from_hub(name: str) -> Path:
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name or not name:
        raise ConfigError(f"model {name}: no such folder")
    return _download(name, _TEXTS)


def _download(name: str, patterns: Sequence[str]) -> Path:
    """Fetch missing files of the top folder; if the hub does not answer, use those that are there.

    The hub is asked once: the answer to a first request decides.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    with one_line_errors(name):
        try:
            return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=["*/*"]))
        except (HfHubHTTPError, LocalEntryNotFoundError) as error:
            raise ConfigError(
                f"model {name}: no such folder, and the hub does not give it ({first_line(error.__cause__ or error)}); "
                "name a folder, or run `hf auth login` for a gated model, or "
                f"`hf download {name}` where there is a network, copy the cache here and set HF_HUB_OFFLINE=1"
            ) from error


@contextlib.contextmanager
def one_line_errors(path: str | Path, part: str = "cannot be loaded") -> Iterator[None]:
    """Turn what libraries raise for a damaged or foreign checkpoint into a `ConfigError` of one line.

    `part`: the file that is read, if known.
    """
    try:
        yield
    except AmusdError:
        raise
    except Exception as error:  # they raise every kind, TypeError and plain Exception included
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            raise UnsupportedModelError(f"model {path}: it needs code of its own, which is never run") from error
        raise ConfigError(f"model {path}: {part}: {first_line(error)}") from error
