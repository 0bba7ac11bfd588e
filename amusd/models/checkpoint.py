"""A checkpoint: the folder that the user names, or the model hub's cache of it, and its weights in safetensors files.

Whatever else a name may mean (no folder, an adapter, files of another format, pointers), and whatever is wrong with a
file, is refused in one line. Weights are mapped into memory: a tensor is read where it is used.
"""

from __future__ import annotations

import contextlib
import functools
import json
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amusd.errors import AmusdError, ConfigError, UnsupportedModelError

CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"
_HEADS = ("medusa_lm_head.safetensors", "pytorch_model.bin", "medusa_lm_head.pt")
"""Files in which drafters are published beside those of any model; the last two are pickles."""
_TEXTS = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
"""Files of a hub repository that say how to use its weights."""
_LOADED = (".json", ".jinja", ".model", ".safetensors")
"""Endings of the files that are read."""
_POINTER = b"version https://git-lfs"
"""Start of a Git LFS file whose contents have not been fetched."""
_MAX_POINTER_BYTES = 1024
_MERGE_ADAPTER = "put it into its base model with merge_and_unload() of peft, and save that"
_USE_SAFETENSORS = "use the checkpoint in safetensors that they were made from"


class Checkpoint:
    """The tensors of a checkpoint by name. They and this object keep the files mapped."""

    def __init__(self, path: str | Path, files: Iterable[Path]) -> None:
        """`path`: name used in messages. Raises `ConfigError` for a file that is missing, cut short or no weights."""
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
        """Names of all tensors."""
        return list(self._file_of)

    def dtype(self, name: str) -> str:
        """The format's name of a tensor's dtype, for instance `BF16`. Reads no data."""
        return str(self._file_of[name].get_slice(name).get_dtype())

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU, in the mapped file: it must not be written to."""
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open the weights of a folder or hub name. Raises `ConfigError` if a file is missing or damaged."""
    folder = find_checkpoint(path)
    names = _weight_files(path, folder)
    is_local = folder == Path(path).expanduser()
    if not is_local and not all((folder / name).exists() for name in names):
        folder = _download(str(path), names)
    if names == [_WEIGHTS] and not (folder / _WEIGHTS).exists():
        raise ConfigError(f"model {path}: no {_WEIGHTS} and no {_INDEX} in it{_instead_of_weights(folder)}")
    return Checkpoint(path, [folder / name for name in names])


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
        checkpoint = Checkpoint(path, files)
        return {name: checkpoint.tensor(name) for name in checkpoint.names}
    raise ConfigError(f"model {path}: no weights of a drafter in it: {', '.join((_WEIGHTS, *_HEADS))}")


def _unpickle(path: str | Path, file: Path) -> Mapping[str, Tensor]:
    """The tensors of a pickle, mapped where its format allows."""
    with one_line_errors(path, file.name):
        try:
            try:
                loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # a file of before torch 1.6 cannot be mapped
                loaded = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            if type(error).__name__ != "UnpicklingError":  # its module is imported nowhere here
                raise
            raise ConfigError(
                f"model {path}: {file.name} is damaged or holds more than tensors, which is never run; "
                "convert it to safetensors"
            ) from error
    if not isinstance(loaded, Mapping) or not all(isinstance(each, Tensor) for each in loaded.values()):
        raise ConfigError(f"model {path}: {file.name} does not hold tensors by name")
    return {f"{name}": tensor.detach() for name, tensor in loaded.items()}


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


def find_checkpoint(path: str | Path) -> Path:
    """The folder `path`, or the cached one of the hub's model of this name, where weights may still be missing.

    Raises `ConfigError` if there is none, or it holds no checkpoint.
    """
    try:
        folder = Path(path).expanduser()
        is_folder = stat.S_ISDIR(folder.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        folder, is_folder = _from_hub(str(path)), True
    except (OSError, RuntimeError, ValueError) as error:  # not allowed to look; `~nobody`; no name of a file
        raise ConfigError(f"model {path}: {first_line(error)}") from error
    if not is_folder:
        what = "a GGUF file, which is not run" if folder.suffix == ".gguf" else "a file"
        raise ConfigError(f"model {path}: {what}; name the folder of a checkpoint ({CONFIG}, *.safetensors, tokenizer)")
    with one_line_errors(path):
        _check_files(path, folder)
    return folder


def _check_files(path: str | Path, folder: Path) -> None:
    """Raise `ConfigError` for a folder without a configuration, and for links and pointers without their files."""
    files = sorted(folder.iterdir())
    for file in (file for file in files if file.name.endswith(_LOADED)):
        if not file.exists():
            raise ConfigError(f"model {path}: {file.name} is a link to {file.readlink()}, which is not there")
        if file.is_file() and file.stat().st_size < _MAX_POINTER_BYTES and file.read_bytes().startswith(_POINTER):
            raise ConfigError(f"model {path}: {file.name} is a pointer of Git LFS; fetch the file with: git lfs pull")
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"model {path}: {_instead_of_checkpoint(folder, [file.name for file in files])}")


def _instead_of_checkpoint(folder: Path, names: Sequence[str]) -> str:
    """Say what a folder without a configuration is, and what to do with it."""
    if "adapter_config.json" in names:
        return f"a LoRA adapter, no model; {_MERGE_ADAPTER}"
    if any(name.endswith(".gguf") for name in names):
        return f"GGUF files, which are not run; {_USE_SAFETENSORS}"
    below = sorted([*folder.glob(f"*/{CONFIG}"), *folder.glob(f"snapshots/*/{CONFIG}")])
    return f"no {CONFIG} in it{f'; did you mean {below[0].parent}?' if below else ''}"


def _instead_of_weights(folder: Path) -> str:
    """Say what a folder holds beside its configuration instead of weights, and what to do with it."""
    names = sorted(file.name for file in folder.iterdir())
    if "adapter_model.safetensors" in names:
        return f"; it holds a LoRA adapter: {_MERGE_ADAPTER}"
    if others := [name for name in names if name.endswith((".bin", ".pt", ".pth"))]:
        return (
            f'; convert {others[0]}: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )
    return f"; GGUF files are not run: {_USE_SAFETENSORS}" if any(name.endswith(".gguf") for name in names) else ""


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
        except LocalEntryNotFoundError as error:
            raise ConfigError(f"model {name}: {_why_not_reached(name, error)}") from error
        except HfHubHTTPError as error:
            raise ConfigError(
                f"model {name}: no such folder, and the model hub refuses it ({type(error).__name__}); see whether the "
                "name is right; for a gated or private model accept its terms on the hub and run: hf auth login"
            ) from error


def _why_not_reached(name: str, error: Any) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return (
            "no such folder, nor in the hub's cache, and HF_HUB_OFFLINE=1 forbids to fetch it; name a folder, or unset "
            "HF_HUB_OFFLINE"
        )
    return (
        f"no such folder, and the model hub does not answer ({first_line(error.__cause__ or error)}); name a folder, "
        f"or fetch it where there is a network with `hf download {name}`, copy the cache here and set HF_HUB_OFFLINE=1"
    )


def first_line(error: BaseException) -> str:
    """One line of another library's error, after the error's type where the message alone would be a riddle."""
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    line = f"{first} {others[0]}" if first.endswith(":") and others else first
    if isinstance(error, (OSError, RuntimeError, ValueError)) and line:
        return line
    return f"{type(error).__name__}: {line}".removesuffix(": ")


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
