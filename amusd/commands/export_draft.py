"""`amusd export-draft`: the embedded draft for other systems."""

from __future__ import annotations

from pathlib import Path

from amusd.checkpoints.embedded_draft import export_draft
from amusd.checkpoints.embedded_target import embedded_target_path
from amusd.files import make_new_folder
from amusd.logs import logger


def run(folder: Path) -> int:
    """Write a transformers checkpoint into a new folder; return the exit code. Raises `ConfigError`."""
    make_new_folder(folder)  # before the target is unpacked: a mistake costs nothing
    target = embedded_target_path()
    export_draft(target, folder)
    logger.info(f"the embedded draft is in {folder}; its target: {target}")
    return 0
