"""The command-line options that all experiments share."""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from amusd.config import WorkloadConfig
from amusd.errors import ConfigError
from amusd.workload import WorkloadPrompt, load_prompts

ROOT = Path(__file__).resolve().parents[1]
QUICK_PROMPTS, QUICK_TOKENS = 2, 16


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call of an experiment."""

    experiment: str
    prompts: Path | None
    """A file; None: the package's own prompts."""
    num_prompts: int
    num_tokens: int
    """Most tokens of an answer."""
    quick: bool
    out: Path
    runs: Path
    """A new folder for all run directories."""

    def workload(self, lines: Sequence[str] | None = None, name: str = "prompts") -> list[str]:
        """Write the chosen prompts (or these `lines` of them) beside the runs; return the overrides that name them."""
        chosen = self.lines() if lines is None else lines
        self.runs.mkdir(parents=True, exist_ok=True)
        path = self.runs / f"{name}.jsonl"
        path.write_text("".join(f"{line}\n" for line in chosen), encoding="utf-8")
        return [
            f"workload.path={path}",
            f"workload.num_prompts={len(chosen)}",
            f"sampling.max_new_tokens={self.num_tokens}",
        ]

    def load(self) -> list[WorkloadPrompt]:
        """Write the chosen prompts as `workload` does, and return them."""
        self.workload()
        return load_prompts(WorkloadConfig(path=str(self.runs / "prompts.jsonl")), sys.maxsize)

    def lines(self) -> list[str]:
        """Return `num_prompts` lines spread evenly over the file, or all if it has fewer. Raises `ConfigError`."""
        found = [line for line in self._text().split("\n") if line.strip()]
        number = min(self.num_prompts, len(found))
        return [found[index * len(found) // number] for index in range(number)]

    def described(self) -> dict[str, Any]:
        """The workload for a file of results; prompts by name and digest, since paths differ between machines."""
        return {
            "prompts": "amusd/prompts.jsonl" if self.prompts is None else self.prompts.name,
            "sha256": hashlib.sha256(self._text().encode()).hexdigest(),
            "num_prompts": len(self.lines()),
            "num_tokens": self.num_tokens,
        }

    def _text(self) -> str:
        if self.prompts is None:
            return resources.files("amusd").joinpath("prompts.jsonl").read_text(encoding="utf-8")
        try:
            return self.prompts.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompts={self.prompts}: {error}") from error


def parser_of(
    experiment: str, description: str | None, *, num_prompts: int, num_tokens: int
) -> argparse.ArgumentParser:
    """The options that every experiment takes. The numbers are defaults."""
    parser = argparse.ArgumentParser(
        prog=f"python experiments/{experiment}/run.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines (default: the package's own)")
    parser.add_argument("--num-prompts", type=int, help=f"taken evenly from the file (default: {num_prompts})")
    parser.add_argument("--tokens", type=int, help=f"most tokens of an answer (default: {num_tokens})")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_PROMPTS} prompts, {QUICK_TOKENS} tokens, few settings; the results stay with the runs",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"default: experiments/{experiment}/results/{experiment}.json"
    )
    parser.add_argument(
        "--runs", type=Path, metavar="FOLDER", help="for the run directories (default: a new one in runs/)"
    )
    parser.set_defaults(experiment=experiment, default_prompts=num_prompts, default_tokens=num_tokens)
    return parser


def request_of(arguments: argparse.Namespace) -> Request:
    """The request of the arguments, with defaults filled in. Makes no folder. Raises `ConfigError`."""
    experiment, quick = arguments.experiment, arguments.quick
    num_prompts = _given("--num-prompts", arguments.num_prompts, QUICK_PROMPTS if quick else arguments.default_prompts)
    num_tokens = _given("--tokens", arguments.tokens, QUICK_TOKENS if quick else arguments.default_tokens)
    new = f"{experiment}-{dt.datetime.now().astimezone():%Y-%m-%d-%H%M%S}-{os.getpid()}"
    runs = (arguments.runs or ROOT / "runs" / new).absolute()
    kept = runs / "quick.json" if quick else ROOT / "experiments" / experiment / "results" / f"{experiment}.json"
    return Request(
        experiment=experiment,
        prompts=None if arguments.prompts is None else arguments.prompts.absolute(),
        num_prompts=num_prompts,
        num_tokens=num_tokens,
        quick=quick,
        out=arguments.out or kept,
        runs=runs,
    )


def _given(option: str, value: int | None, default: int) -> int:
    if value is None:
        return default
    if value < 1:
        raise ConfigError(f"{option}={value}: must be at least 1")
    return value
