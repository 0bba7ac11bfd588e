"""Sets torch's variables and threads for a run, and describes the machine.

Thread pools keep the settings that they find when torch is imported, so threads are set first.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import amusd
from amusd.runtime.cores import allowed_cores

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pyzmq", "hydra-core", "omegaconf", "gguf")
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
"""Instructions that a model's speed depends on, as Linux names them."""
_GPU_FACTS = "name,memory.total,driver_version"
_PROBE_SECONDS = 5.0


def set_environment(num_threads: int) -> None:
    """Set the log level of torch, and the threads of numeric libraries, in this process and its children."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for variable in THREAD_VARIABLES:
        os.environ[variable] = str(num_threads)
    if "torch" in sys.modules:  # too late for the variables
        import torch

        torch.set_num_threads(num_threads)


def describe_environment() -> dict[str, Any]:
    """The content of `environment.json`. Raises nothing: what is unknown is left empty."""
    core = _first_core()
    flags = core.get("flags", "").split()
    return {
        "date": dt.datetime.now().astimezone().date().isoformat(),
        "amusd": amusd.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {
            name: next((found.version for found in metadata.distributions(name=name)), None) for name in PACKAGES
        },
        "cpu": {
            "model": core.get("model name") or platform.processor() or platform.machine(),
            "features": [feature for feature in CPU_FEATURES if feature in flags],
            "cores": os.cpu_count(),
            "allowed_cores": len(allowed_cores()),
        },
        "gpus": _output_of(f"nvidia-smi --query-gpu={_GPU_FACTS} --format=csv,noheader").splitlines(),
        "commit": _commit(),
    }


def _first_core() -> dict[str, str]:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        pairs = (line.partition(":") for line in reversed(lines))
        return {name.strip(): value.strip() for name, _, value in pairs}
    return {}


def _commit() -> str | None:
    """Commit of this checkout, `+changes` if modified; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    return _output_of("git describe --always --abbrev=40 --exclude=* --dirty=+changes", root) or None


def _output_of(command: str, folder: Path | None = None) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command.split(), cwd=folder, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True
        ).stdout.strip()
    return ""
