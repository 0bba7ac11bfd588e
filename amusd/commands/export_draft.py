"""`amusd export-draft` writes the embedded draft as a transformers checkpoint, for other systems."""

from __future__ import annotations

from pathlib import Path

from amusd.console import Console
from amusd.models.embedded_draft import export_draft, make_new_folder
from amusd.models.embedded_target import embedded_target_path


def export_embedded_draft(folder: Path) -> int:
    """Write the embedded draft to `folder` as a transformers checkpoint. Raises `ConfigError`."""
    console = Console(json_only=False)
    make_new_folder(folder)  # before the target is unpacked: a mistake costs nothing
    target = embedded_target_path(report=console.note)
    export_draft(target, folder)
    console.note(f"the embedded draft is in {folder}; its target: {target}")
    return 0
