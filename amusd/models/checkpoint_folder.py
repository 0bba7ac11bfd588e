"""The folder with a checkpoint's files: one that the user names, or the cache of what the model hub has.

Whatever else a name may mean (no folder, an adapter, files of another format, pointers) is refused in one line. Weights
are opened elsewhere (`checkpoint.py`).
"""

from __future__ import annotations

import contextlib
import functools
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from amusd.errors import AmusdError, ConfigError, UnsupportedModelError

CONFIG = "config.json"
_TEXTS = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt")
"""Files of a repository of the hub that say how to use its weights."""
_LOADED = (".json", ".jinja", ".model", ".safetensors")
"""Endings of the files that are read."""
_POINTER = b"version https://git-lfs"
"""How a file of git begins whose contents have not been fetched."""
_MAX_POINTER_BYTES = 1024


def find_checkpoint(path: str | Path) -> Path:
    """The folder `path`, or the one where files of the hub's model of this name are; its weights may be missing there.

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


def fetch_weights(path: str | Path, folder: Path, names: Sequence[str]) -> Path:
    """The folder with the files `names` as well, where the hub has them; `folder`: from `find_checkpoint(path)`."""
    is_local = folder == Path(path).expanduser()
    return folder if is_local or all((folder / name).exists() for name in names) else _download(str(path), names)


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line, after its kind where the message alone would be a riddle."""
    first, *others = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    line = f"{first} {others[0]}" if first.endswith(":") and others else first
    if isinstance(error, (OSError, RuntimeError, ValueError)) and line:
        return line
    return f"{type(error).__name__}: {line}".removesuffix(": ")


@contextlib.contextmanager
def one_line_errors(path: str | Path, part: str = "cannot be loaded") -> Iterator[None]:
    """Turn what libraries raise for a damaged or foreign checkpoint into a `ConfigError` of one line.

    `part`: the file that is read, where it is known.
    """
    try:
        yield
    except AmusdError:
        raise
    except Exception as error:  # they raise every kind, TypeError and plain Exception included
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            raise UnsupportedModelError(f"model {path}: it needs code of its own, which is never run") from error
        raise ConfigError(f"model {path}: {part}: {first_line(error)}") from error


def _check_files(path: str | Path, folder: Path) -> None:
    """Raise `ConfigError` for a folder without a configuration, and for files that are not there in truth."""
    files = sorted(folder.iterdir())
    for file in (file for file in files if file.name.endswith(_LOADED)):
        if not file.exists():
            raise ConfigError(f"model {path}: {file.name} is a link to {file.readlink()}, which is not there")
        if file.is_file() and file.stat().st_size < _MAX_POINTER_BYTES and file.read_bytes().startswith(_POINTER):
            raise ConfigError(f"model {path}: {file.name} is a pointer of Git LFS; fetch the file with: git lfs pull")
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"model {path}: {_instead_of_checkpoint(folder, [file.name for file in files])}")


def _instead_of_checkpoint(folder: Path, names: Sequence[str]) -> str:
    """What a folder without a configuration is."""
    if "adapter_config.json" in names:
        return "a LoRA adapter, no model; put it into its base model with merge_and_unload() of peft, and save that"
    if any(name.endswith(".gguf") for name in names):
        return "GGUF files, which are not run; use the checkpoint in safetensors that they were made from"
    below = sorted([*folder.glob(f"*/{CONFIG}"), *folder.glob(f"snapshots/*/{CONFIG}")])
    return f"no {CONFIG} in it{f'; did you mean {below[0].parent}?' if below else ''}"


@functools.cache
def _from_hub(name: str) -> Path:
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name or not name:
        raise ConfigError(f"model {name}: no such folder")
    return _download(name, _TEXTS)


def _download(name: str, patterns: Sequence[str]) -> Path:
    """Fetch files of the top folder that are not there yet; where the hub does not answer, those that are there count.

    It is asked once: the answer to a first request decides.
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
