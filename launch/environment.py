"""The facts a number depends on: machine, versions, commit. Knows no torch, and never fails a run."""

from __future__ import annotations

import datetime as dt
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import amusd
from amusd.runtime.cores import allowed_cores

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pyzmq", "hydra-core", "omegaconf", "gguf")
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
"""The instructions that a model's speed hangs on, as Linux names them."""
_PROBE_SECONDS = 5.0


def describe_environment() -> dict[str, Any]:
    """The content of `environment.json`."""
    model, features = _cpu()
    return {
        "date": dt.datetime.now().astimezone().date().isoformat(),
        "amusd": amusd.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": {
            "model": model,
            "features": features,
            "cores": os.cpu_count(),
            "allowed_cores": len(allowed_cores()),
        },
        "gpus": _gpus(),
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> tuple[str, list[str]]:
    """Its name, and those of `CPU_FEATURES` that it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine(), []
    first = {name.strip(): value.strip() for line in reversed(lines) for name, _, value in [line.partition(":")]}
    has = set(first.get("flags", "").split())
    return first.get("model name", platform.machine()), [feature for feature in CPU_FEATURES if feature in has]


def _gpus() -> list[str]:
    """One line per GPU: name, memory, driver version."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return _output_of(query).splitlines()


def _commit() -> str | None:
    """The commit of the checkout this runs from, `+changes` when files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    commit = _output_of(["git", "-C", str(root), "rev-parse", "--verify", "-q", "HEAD"])
    if not commit:
        return None
    changed = _output_of(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}+changes" if changed else commit


def _output_of(command: list[str]) -> str:
    """The output of a short command; empty when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
