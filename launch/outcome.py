"""How a group's jobs ended, told to the launcher in a file by its machine's first rank: a line each, once it is known.

What was told stays told when the workers are killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the file says."""

    job_codes: tuple[int, ...] = ()
    """Exit codes of the jobs that ended, in order."""
    num_begun: int = 0
    """Jobs, those that ended included."""
    exit_code: int | None = None
    """Of that rank; None when it was killed."""

    def is_whole(self, num_jobs: int) -> bool:
        """Whether nothing is left to be told that an exit code depends on."""
        return self.exit_code is not None or len(self.job_codes) == num_jobs


def tell_begin(path: Path | None) -> None:
    """The next job begins. Without a path nobody asks."""
    _append(path, "begin", 0)


def tell_job_code(path: Path | None, code: int) -> None:
    """The job that has begun has ended."""
    _append(path, "job", code)


def tell_exit_code(path: Path | None, code: int) -> None:
    """The rank has ended."""
    _append(path, "end", code)


def read_outcome(path: Path) -> Outcome:
    """What has been told."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    ends = _codes(lines, "end")
    return Outcome(
        job_codes=_codes(lines, "job"), num_begun=len(_codes(lines, "begin")), exit_code=ends[-1] if ends else None
    )


def _append(path: Path | None, what: str, code: int) -> None:
    if path is not None and path.parent.exists():  # else the launcher was killed, and its folder taken away
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{what} {code}\n")


def _codes(lines: Sequence[str], what: str) -> tuple[int, ...]:
    return tuple(int(line.partition(" ")[2]) for line in lines if line.startswith(f"{what} "))
