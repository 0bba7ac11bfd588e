"""The private folder of a run: group file, seal, socket files. Gone with the run, or found by the next one.

A folder is locked for as long as its process lives, so one that can be locked is left over from a process that was
killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
