"""Files that a reader sees whole or not at all."""

from __future__ import annotations

import json
import os
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from amusd.errors import ConfigError


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or none. Raises `ConfigError` where it cannot be written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from None


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON document. Raises `ConfigError` as `write_whole`."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON document; None where there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def cannot_write(path: Path | str, error: OSError) -> ConfigError:
    """A line for the user about an output that failed: the disk is full, the folder read-only, the file too large."""
    return ConfigError(f"{path}: cannot be written ({error.strerror})")


def keep_traceback(folder: Path, worker: str, error: BaseException) -> None:
    """Write the traceback of what ended a worker to `WORKER_error.txt`; nothing where that cannot be written."""
    with suppress(ConfigError):
        write_whole(folder / error_file(worker), "".join(traceback.format_exception(error)))


def error_file(worker: str) -> str:
    """Name of the file in a run directory that says what ended this worker."""
    return f"{worker}_error.txt"
