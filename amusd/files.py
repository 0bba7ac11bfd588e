"""Files: atomic writes, checks of checkpoint folders, private folders for sockets."""

from __future__ import annotations

import json
import os
import re
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from amusd.errors import ConfigError, first_line

RESULT_FILE = "result.json"
PARTIAL_FILE = "partial.txt"
"""Text of an unfinished answer; a result replaces it."""
ANSWERS_FILE = "answers.jsonl"
"""Every answer of a comparison, with its time."""
MEASURED_FILES = (RESULT_FILE, PARTIAL_FILE, "target_error.txt", "draft_error.txt")
SHOWN_FILES = (ANSWERS_FILE, "trace.json", "comparison.svg", "comparison.png", "timeline.svg", "timeline.png")
"""Files of a run directory. A refused run leaves no `MEASURED_FILES` or `SHOWN_FILES`."""
CONFIG_JSON, TOKENIZER = "config.json", "tokenizer.json"
"""Files of a checkpoint."""
CHECKPOINT = "a checkpoint is config.json, *.safetensors and a tokenizer; convert adapters, GGUF and pickles to that"
_NO_TOKENIZER = (
    "use drafter=eagle, medusa or dflash with drafter.model if it drafts from a target's hidden states; else copy the "
    "base model's there, or AutoTokenizer.from_pretrained(folder).save_pretrained(folder) with transformers"
)
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)

MAX_SOCKET_FOLDER = 75
"""Longest path in bytes: `/amusd-ranks-12345678/10` follows, and macOS allows 103 in all."""


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises `ConfigError`."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            partial.write_text(text, encoding="utf-8", errors="backslashreplace")  # paths need not be UTF-8
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON document. Raises `ConfigError`."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON document; None without a file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def cache_folder() -> Path:
    """The folder for files made once. Raises `ConfigError` without a home folder."""
    try:
        return Path.home() / ".cache" / "amusd"
    except RuntimeError:
        raise ConfigError("HOME is not set, and the user has no home folder; set HOME to a folder") from None


def make_new_folder(folder: Path, mode: int = 0o777) -> None:
    """Make an empty folder. Raises `ConfigError` if it holds anything, or cannot be made."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder}: not empty; name a new folder")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be used: {error.strerror}") from None


def make_socket_folder(prefix: str = "amusd-") -> str:
    """Make a private folder for socket files; in /tmp if TMPDIR is too long or not printable.

    Raises `ConfigError`.
    """
    try:
        folder = tempfile.gettempdir()
        is_short = len(os.fsencode(folder)) <= MAX_SOCKET_FOLDER and folder.isprintable()
        return tempfile.mkdtemp(prefix=prefix, dir=folder if is_short else "/tmp")  # noqa: S108 - a new folder in it
    except OSError as error:
        raise ConfigError(f"TMPDIR: no folder for sockets can be made: {error}") from None


def check_checkpoint(model: str | Path, *needed: str, folder: Path | None = None) -> None:
    """Raise `ConfigError` if a model's folder is no checkpoint, or lacks a `needed` file. Reads no weights.

    A folder that does not exist passes if `model` can be a hub name. `folder`: where the hub's files are.
    """
    why = None
    try:
        folder = folder or Path(model).expanduser()
        if folder.is_file():
            why = f"a file, no folder; {CHECKPOINT}"
        elif not folder.is_dir():
            why = None if _HUB_NAME.fullmatch(str(model)) else "no such folder"
        elif lacking := next((name for name in needed if not (folder / name).is_file()), None):
            why = f"no {lacking} in it; {_NO_TOKENIZER if lacking == TOKENIZER else CHECKPOINT}"
    except (OSError, RuntimeError) as error:  # a name too long, or an unknown user's home
        why = f"no such folder ({first_line(error)})"
    if why is not None:
        raise ConfigError(f"model {model}: {why}")


def cannot_write(path: Path | str, error: OSError) -> ConfigError:
    """The error for an output that could not be written."""
    return ConfigError(f"{path}: cannot be written ({error.strerror})")


def keep_traceback(folder: Path, worker: str, error: BaseException) -> None:
    """Write the traceback of a worker's error to `WORKER_error.txt`, if possible."""
    with suppress(ConfigError):
        write_whole(folder / f"{worker}_error.txt", "".join(traceback.format_exception(error)))
