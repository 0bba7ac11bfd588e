"""Commands that need no pair of workers: `bench`, `simulate`, `export-draft`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from amusd.config import RunConfig
from amusd.console import Console, tell
from amusd.errors import ConfigError
from amusd.files import make_new_folder, write_json
from amusd.runtime.devices import settle_devices

from .devices import set_threads
from .run_directory import EVENTS_FOLDER, RESULT_FILE


def run_bench(config: RunConfig, directory: Path, _console: Console) -> int:
    """Measure; returns the exit code. Raises `ConfigError` for an unusable device."""
    if (size := config.target_tensor_parallel_size) > 1:
        raise ConfigError(
            f"target_tensor_parallel_size={size}: `amusd bench` measures one process of each role; allowed: 1"
        )
    set_threads(config.hardware.num_threads)
    config = dataclasses.replace(config, hardware=settle_devices(config.engine(), tell))
    from amusd.commands.bench import bench

    return bench(config, directory)


def run_simulate(config: RunConfig, directory: Path, console: Console) -> int:
    """Predict; returns the exit code. Raises `ConfigError` for missing inputs."""
    from amusd.commands.simulate import simulate, simulate_text, simulator_of

    result = simulate(config, simulator_of(config), console, directory / EVENTS_FOLDER)
    result["run_dir"] = str(directory)
    try:
        write_json(directory / RESULT_FILE, result)
    finally:  # what no file can take is shown all the same
        console.text(simulate_text(result))
        console.document(result)
    return 0


def export_embedded_draft(folder: Path) -> int:
    """Write the embedded draft as a transformers checkpoint. Raises `ConfigError`."""
    from amusd.models.embedded_draft import export_draft
    from amusd.models.embedded_target import embedded_target_path

    console = Console(json_only=False)
    make_new_folder(folder)  # before the target is unpacked: a mistake costs nothing
    target = embedded_target_path(report=console.note)
    export_draft(target, folder)
    console.note(f"the embedded draft is in {folder}; its target: {target}")
    return 0
