"""Shared by the experiments: running `amusd` commands, and files of results that say where they come from."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from amusd.commands.tables import row_name
from amusd.errors import ConfigError
from amusd.files import ANSWERS_FILE
from experiments.request import ROOT, Request

COMMAND_SECONDS = 12 * 3600.0
ENDING_SECONDS = 60.0
REQUIRED = ("experiment", "date", "commit", "machine", "command", "quick", "workload")
"""The keys that every file of results has beside its measurements."""
Document = dict[str, Any]
_FOLDERS = re.compile(r"(?:[^/,:\[\]]*/)+")


# Commands


def run_amusd(
    command: str, overrides: Sequence[str], run_dir: Path, *, sweep: bool = False, under: Sequence[str] = ()
) -> Document:
    """Run one `amusd` command of this checkout; return the JSON document that it prints.

    `under`: words before the command, such as those of `taskset`. Raises `ConfigError` if it fails.
    """
    arguments = [command, *(["-m"] if sweep else []), *overrides]
    print(shlex.join(["amusd", *without_folders(arguments)]), file=sys.stderr, flush=True)
    process = start_amusd([*arguments, "output=json", f"run_dir={run_dir}"], under, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate(timeout=COMMAND_SECONDS)
    except BaseException:
        end(process)
        raise
    if process.returncode:
        raise ConfigError(
            f"amusd {command}: exit code {process.returncode}; what it said is above, its files: {run_dir}"
        )
    document: Document = json.loads(output.splitlines()[-1])
    return document


def start_amusd(arguments: Sequence[str], under: Sequence[str] = (), **options: Any) -> subprocess.Popen[Any]:
    """Start a command of this checkout. `under`: words before it; `options`: those of `Popen`."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [*under, sys.executable, "-m", "launch.main", *arguments]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **options)


def end(process: subprocess.Popen[Any]) -> None:
    """End a process by SIGTERM, or by SIGKILL if it does not end. Idempotent."""
    process.terminate()
    try:
        process.wait(ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def compare(overrides: Sequence[str], run_dir: Path) -> list[Document]:
    """Run `amusd compare` as a sweep and print its table; returns one document per job.

    Raises `ConfigError` without one.
    """
    from launch.run_directory import summary_table

    run_amusd("compare", overrides, run_dir, sweep=True)
    document = read_json(run_dir / "sweep.json")
    print(summary_table(document))
    jobs = []
    for job in document["jobs"]:
        result = read_json(run_dir / str(job["job"]) / "result.json")
        jobs.append(
            {
                "command": shlex.join(["amusd", "compare", *without_folders(job["overrides"])]),
                "settings": job["swept"],
                "rows": result["rows"],
                "per_prompt": per_prompt_of(run_dir / str(job["job"])),
                "machine": result["environment"],
            }
        )
    return jobs


def without_folders(arguments: Sequence[str]) -> list[str]:
    """Arguments whose paths are cut to their last name."""
    found = []
    for argument in arguments:
        key, equals, value = argument.rpartition("=")
        found.append(f"{key}{equals}{_FOLDERS.sub('', value)}")
    return found


# Results


def write_jobs(request: Request, jobs: Sequence[Document], **more: Any) -> None:
    """Write the results of `compare` to a file, with `more` beside them."""
    kept = [{name: value for name, value in job.items() if name != "machine"} for job in jobs]
    write_results(request, jobs[0]["machine"], {"jobs": kept, **more})


def write_results(request: Request, machine: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
    """Write measurements with date, commit, machine and command. `machine`: as in a run's `environment.json`."""
    script = f"experiments/{request.experiment}/{Path(sys.argv[0]).name}"
    document = {
        "experiment": request.experiment,
        "date": dt.datetime.now().astimezone().date().isoformat(),
        "commit": machine["commit"],
        "machine": {name: value for name, value in machine.items() if name != "commit"},
        "command": shlex.join(["python", script, *without_folders(sys.argv[1:])]),
        "quick": request.quick,
        "workload": request.described(),
        **measured,
    }
    request.out.parent.mkdir(parents=True, exist_ok=True)
    request.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"results: {request.out}", file=sys.stderr)


def read_results(path: Path) -> Document:
    """A file that `write_results` wrote. Raises `ConfigError` for any other."""
    document = read_json(path)
    missing = [name for name in REQUIRED if name not in document]
    if missing:
        raise ConfigError(f"{path}: not a file of results: no {', '.join(missing)}")
    return document


def read_json(path: Path) -> Document:
    """Read a JSON object. Raises `ConfigError` if the file does not exist or holds something else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return document


# Reading results


def per_prompt_of(run_dir: Path) -> list[Document]:
    """Each prompt's category, and the time per token of every row in its first answer."""
    found: dict[int, Document] = {}
    for line in (run_dir / ANSWERS_FILE).read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)
        number = answer["prompt"]
        own = found.setdefault(number, {"number": number, "category": answer["category"], "ms_per_token": {}})
        own["ms_per_token"].setdefault(answer["contestant"], answer["ms"] / answer["tokens"])
    return list(found.values())


def row_kind(row: Document) -> str:
    """The name of a row without its tuned length, so that it is the same in all jobs of a sweep."""
    return row_name({**row, "num_speculative_tokens": None})


def speedups(per_prompt: Sequence[Document], contestant: str) -> list[float]:
    """Return each prompt's speed relative to plain decoding in the same run."""
    return [one["ms_per_token"]["autoregressive"] / one["ms_per_token"][contestant] for one in per_prompt]


def middle_half(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, median, upper
