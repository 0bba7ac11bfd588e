"""The measurements of a part, as lines of JSON that are written at once, and the ending of the part."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.gpu_proof.plan import Scale

Record = dict[str, Any]
"""One measurement: its `kind`, its subject and its figures."""

DONE, FAILED, TIMED_OUT = "done", "failed", "timed out"


@dataclass(frozen=True, slots=True)
class Job:
    """The input of a part."""

    scale: Scale
    write: Callable[..., None]
    """`write(kind, **values)`: keep one measurement."""
    results: Path
    """The folder with measurements of all parts; this part may keep files in a folder of its name."""
    part: str
    """The part's name."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a part ended."""

    part: str
    status: str
    """`done`, `failed` or `timed out`."""
    seconds: float
    exit_code: int | None
    """The negative number of a signal that ended it; None if it timed out."""
    reason: str
    """The last lines of its standard error, unless it is done."""


def writer(path: Path) -> Callable[..., None]:
    """Return a function that appends a measurement to a file at once."""

    def write(kind: str, **values: Any) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")

    return write


def read_records(path: Path) -> list[Record]:
    """The measurements in a file, without a last line that was cut off; none if there is no file."""
    if not path.is_file():
        return []
    *lines, _ = path.read_text(encoding="utf-8").split("\n")  # what was cut off has no end of line
    return [json.loads(line) for line in lines]


def write_ending(folder: Path, ending: Ending) -> None:
    """Write the ending beside the part's measurements."""
    (folder / f"{ending.part}.json").write_text(json.dumps(asdict(ending), indent=1) + "\n", encoding="utf-8")


def read_ending(folder: Path, part: str) -> Ending | None:
    """The ending of a part; None if it was not tried."""
    path = folder / f"{part}.json"
    return Ending(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def find(records: Sequence[Record], kind: str, **wanted: Any) -> Record | None:
    """The last measurement of this kind with these values."""
    return next((record for record in reversed(records) if is_of(record, kind, wanted)), None)


def is_of(record: Record, kind: str, wanted: Mapping[str, Any]) -> bool:
    """Whether a record is of this kind and has these values."""
    return record["kind"] == kind and all(record.get(key) == value for key, value in wanted.items())
