"""The private folder of a run: group file, socket files, and the file in which the target tells how its jobs ended.

Gone with the run, or found by the next one: a folder is locked for as long as its process lives, so one that can be
locked is left over from a process that was killed. What was told stays told when the workers are killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "amusd-run-"
_UNLOCKED = "new-"
"""Before the name of a folder that is not locked yet."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that only this user can enter, for as long as this lasts. Removes those of killed processes before."""
    _remove_left_over()
    unlocked = Path(tempfile.mkdtemp(prefix=_UNLOCKED + _PREFIX))
    lock = os.open(unlocked, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = unlocked.rename(unlocked.with_name(unlocked.name.removeprefix(_UNLOCKED)))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def is_left_over(folder: Path) -> bool:
    """Whether the process that made this folder has ended, and so does not take it away any more."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # it has been taken away
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its process is at work, or nothing can be locked here
        return False
    finally:
        os.close(lock)
    return True


def _remove_left_over() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it has just gone
            if folder.lstat().st_uid == os.getuid() and is_left_over(folder):
                shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The target's report on a group's jobs, a line each, written once it is known."""

    job_codes: tuple[int, ...] = ()
    """Exit codes of the jobs that ended, in order."""
    num_begun: int = 0
    """Jobs, those that ended included."""
    exit_code: int | None = None
    """Its own; None when it was killed."""

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
    """The target has ended."""
    _append(path, "end", code)


def read_outcome(path: Path) -> Outcome:
    """The outcome as it was told."""
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
