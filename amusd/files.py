"""Files that a reader sees whole or not at all, and the files of a comparison's answers."""

from __future__ import annotations

import csv
import io
import json
import os
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from amusd.errors import ConfigError

PARTIAL_FILE = "partial.txt"
"""Text of an unfinished answer, which a result replaces."""
ANSWERS_FILE, PROMPTS_FILE = "answers.jsonl", "prompts.csv"
"""What was said, and what it took, as a comparison keeps them."""
FIGURE_FILES = tuple(f"{name}.{kind}" for name in ("comparison", "timeline") for kind in ("svg", "png"))
KEYS = ("prompt", "mode", "policy", "drafter", "length", "batch_size", "repeat")
"""Columns that name an answer: line of the workload, way to decode, answers at a time, repetition."""
MEASURES = ("tokens", "ms", "accepted", "identical")
"""Columns of `prompts.csv`: tokens, time, candidates accepted, equality with plain decoding."""

CONTENT = ("text", "token_ids", "finish_reason")

Record = Mapping[str, Any]


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises `ConfigError`."""
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
    """Write a JSON document. Raises `ConfigError`."""
    write_whole(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON document; None without a file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def make_new_folder(folder: Path, mode: int = 0o777) -> None:
    """Make an empty folder. Raises `ConfigError` if it holds anything, or cannot be made."""
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder}: not empty; name a new folder")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be used: {error.strerror}") from None


def cannot_write(path: Path | str, error: OSError) -> ConfigError:
    """A line for the user about an output that failed."""
    return ConfigError(f"{path}: cannot be written ({error.strerror})")


def keep_traceback(folder: Path, worker: str, error: BaseException) -> None:
    """Write the traceback that ended a worker to `WORKER_error.txt`, if possible."""
    with suppress(ConfigError):
        write_whole(folder / error_file(worker), "".join(traceback.format_exception(error)))


def error_file(worker: str) -> str:
    """Name of a worker's error file in a run directory."""
    return f"{worker}_error.txt"


def answers_jsonl(records: Sequence[Record]) -> str:
    """An object a line: all but the measures."""
    return json_lines([{name: value for name, value in record.items() if name not in MEASURES} for record in records])


def json_lines(records: Sequence[Record]) -> str:
    """An object a line."""
    return "".join(json.dumps(record) + "\n" for record in records)


def prompts_csv(records: Sequence[Record]) -> str:
    """A line for each answer, without its text."""
    return csv_text([{name: value for name, value in record.items() if name not in CONTENT} for record in records])


def csv_text(records: Sequence[Record]) -> str:
    """A table with a column for every name in any of the records."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for record in records for name in record)))
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
