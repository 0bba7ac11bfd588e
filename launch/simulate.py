"""`amusd simulate`: arithmetic in this process; no workers, no torch."""

from __future__ import annotations

import json

from amusd.config import RunConfig
from amusd.console import Console
from amusd.errors import ConfigError
from amusd.files import write_whole
from amusd.reporting.map import MAP_FILE, draw_map
from amusd.simulate.inputs import inputs_of
from amusd.simulate.run import simulate, simulate_text

from .run_directory import EVENTS_FOLDER, RESULT_FILE, create_run_directory
from .terminal import tell


def run_simulation(config: RunConfig) -> int:
    """Predict; returns the exit code. Raises `ConfigError` when inputs are missing or the run directory is in use."""
    inputs = inputs_of(config)
    directory = create_run_directory(config)
    tell(f"run directory: {directory}")
    console = Console(json_only=config.output == "json")
    result = simulate(config, inputs, console, directory / EVENTS_FOLDER)
    result["run_dir"] = str(directory)
    try:
        write_whole(directory / RESULT_FILE, json.dumps(result, indent=1) + "\n")
        if "grid" in result:
            try:
                write_whole(directory / MAP_FILE, draw_map(result, config.simulate))
                tell(f"{directory / MAP_FILE}: open it in a browser")
            except ConfigError as lack:
                tell(f"{directory / MAP_FILE}: not drawn: {lack}")
    finally:  # what no file can take is shown all the same
        console.text(simulate_text(result))
        console.document(result)
    return 0
