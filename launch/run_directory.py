"""The folder of a run, and of a sweep. Files appear complete or not at all, and no run is overwritten."""

from __future__ import annotations

import dataclasses
import datetime as dt
import fcntl
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import yaml  # type: ignore[import-untyped]  # OmegaConf brings it, without types

from amusd.commands.tables import rows_table
from amusd.config import RunConfig
from amusd.errors import ConfigError
from amusd.files import MEASURED_FILES, RESULT_FILE, SHOWN_FILES, keep_traceback, read_json, write_json, write_whole
from amusd.logs import logger
from amusd.settings import from_mapping, to_mapping

from .environment import describe_environment

CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
WORKERS_FILE = "workers.json"
"""Process ids of the target's ranks and of the draft."""
OVERRIDES_FILE = "overrides.json"
SUMMARY_FILE = "sweep.json"
"""In the folder of a sweep, beside the job folders."""
EVENTS_FOLDER = "events"
_FIRST_FILES = (CONFIG_FILE, ENVIRONMENT_FILE, WORKERS_FILE)
_MARKS_OF_A_RUN = (*_FIRST_FILES, *MEASURED_FILES, SUMMARY_FILE, EVENTS_FOLDER)
_HIDDEN = (
    *("tokens_per_second_per_device", "p50_inter_token_ms", "p99_inter_token_ms", "target_idle_fraction"),
    *("draft_idle_fraction", "wasted_draft_fraction", "mean_acceptance_length", "identical_to_autoregressive"),
)
"""Columns that the table of a sweep leaves out."""


def new_folder() -> Path:
    """A name for the folder of a run: `runs/<date>-<short hash>`."""
    date = dt.datetime.now().astimezone().strftime("%Y-%m-%d-%H%M%S")
    return Path("runs") / f"{date}-{secrets.token_hex(4)[:7]}"


def create_run_directory(config: RunConfig) -> Path:
    """Write `config.yaml`, `environment.json` and `events/` into `config.run_dir`; return its absolute path.

    Raises `ConfigError`.
    """
    folder = Path(config.run_dir or new_folder())
    try:
        directory = folder.absolute()
        directory.mkdir(parents=True, exist_ok=True)
        marks = _MARKS_OF_A_RUN if config.out else (*_MARKS_OF_A_RUN, *SHOWN_FILES)  # `out` may be one of them
        found = next((name for name in marks if (directory / name).exists()), None)
        if found is not None:
            raise ConfigError(f"run_dir={folder}: already holds a run ({found}); name another folder or delete it")
        (directory / EVENTS_FOLDER).mkdir()
    except OSError as error:
        raise ConfigError(f"run_dir={folder}: cannot be used ({error.strerror})") from None
    kept = to_mapping(dataclasses.replace(config, run_dir=str(directory)).without_secrets())
    write_whole(directory / CONFIG_FILE, str(yaml.safe_dump(kept, sort_keys=False, width=120)))
    write_json(directory / ENVIRONMENT_FILE, describe_environment())
    return directory


@contextmanager
def run_directory(config: RunConfig) -> Iterator[Path]:
    """Make a run directory. The files of an interrupted or failed run are kept, a refused run's are deleted."""
    directory = create_run_directory(config)
    try:
        yield directory
    except ConfigError:
        discard_run(directory)
        raise
    except KeyboardInterrupt:
        logger.info(f"interrupted; what was measured is in {directory}")
        raise
    except Exception as error:
        logger.info(f"run directory: {directory}")
        keep_traceback(directory, "target", error)
        raise


@contextmanager
def sole_sweep(folder: Path) -> Iterator[None]:
    """Make the folder of a sweep, and keep other sweeps out. Raises `ConfigError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        has_other = isinstance(error, BlockingIOError)
        why = "another sweep writes to it" if has_other else f"cannot be used ({error.strerror})"
        raise ConfigError(f"run_dir={folder}: {why}") from None
    try:
        yield
    finally:
        os.close(descriptor)


def clear_run(directory: Path, measured: Sequence[str] = (*MEASURED_FILES, *SHOWN_FILES)) -> None:
    """Delete `_FIRST_FILES`, events and `measured` files of an interrupted run; other files stay."""
    events = directory / EVENTS_FOLDER
    for path in [*(directory / name for name in (*_FIRST_FILES, *measured)), *events.glob("*.jsonl")]:
        path.unlink(missing_ok=True)
    with suppress(OSError):
        events.rmdir()


def discard_run(directory: Path) -> None:
    """Remove the files of a run that was refused before any token."""
    if any((directory / name).exists() for name in MEASURED_FILES) or any((directory / EVENTS_FOLDER).glob("*")):
        return
    clear_run(directory, ())
    with suppress(OSError):
        directory.rmdir()


def is_done(directory: Path, config: RunConfig) -> bool:
    """Whether a sweep's job is complete, without a lost draft. Raises `ConfigError` for other settings."""
    result = read_json(directory / RESULT_FILE) or {}
    if not result.get("complete") or {"draft_failure", "draft_losses"} & result.keys():
        return False
    if dataclasses.replace(read_config(directory), output=config.output, run_dir=config.run_dir) != config:
        raise ConfigError(f"{directory}: was measured with other settings ({CONFIG_FILE}); name another run_dir")
    return True


def read_config(directory: Path) -> RunConfig:
    """The configuration that `create_run_directory` saved."""
    values = cast("dict[str, Any]", yaml.safe_load((directory / CONFIG_FILE).read_text(encoding="utf-8")))
    return from_mapping(RunConfig, values)


def summarize(folder: Path) -> dict[str, Any]:
    """Write and return the document `sweep.json` about all jobs of a sweep."""
    jobs = sorted(map(_job, folder.rglob(OVERRIDES_FILE)), key=itemgetter("job"))
    values = [dict(override.split("=", 1) for override in job["overrides"]) for job in jobs]
    keys = [key for key in dict.fromkeys(chain(*values)) if len({one.get(key) for one in values}) > 1]
    for job, own in zip(jobs, values, strict=True):
        job["swept"] = {key: own.get(key, "") for key in keys}
    document = {"run_dir": str(folder), "swept_keys": keys, "jobs": jobs}
    write_json(folder / SUMMARY_FILE, document)
    return document


def summary_table(document: Mapping[str, Any]) -> str:
    """A table: a line for each row of a job, or one line, `no result`."""
    named = [
        ({"job": job["job"], **job["swept"]}, row)
        for job in document["jobs"]
        for row in job["rows"] or [{"mode": "no result"}]
    ]
    return rows_table([row for _, row in named], _HIDDEN, [name for name, _ in named])


def _job(file: Path) -> dict[str, Any]:
    directory, job = file.parent, read_json(file)
    result = read_json(directory / RESULT_FILE) or {}
    rows = result.get("rows", [])
    if "metrics" in result:  # of one answer
        rows = [{name: result[name] for name in ("mode", "policy", "drafter")} | result["metrics"]]
    elif result.get("complete") and not rows:  # of a file of answers, or of `bench`
        rows = [{"mode": "complete", "tokens_per_second": result.get("tokens_per_second")}]
    return {**job, "run_dir": str(directory), "rows": rows}
