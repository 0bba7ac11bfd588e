"""One part, in a process of its own: `part.py NAME DEVICE RESULTS`. `runner.py` starts it and limits its time."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` and `amusd` are those of this checkout

from experiments.gpu_proof.plan import PARTS, SCALES
from experiments.gpu_proof.records import Job, writer


def main(name: str, device: str, results: Path) -> None:
    """Measure. An error is raised, and what was written before it stays."""
    part = next(part for part in PARTS if part.name == name)
    module, _, function = part.function.partition(":")
    measure = getattr(importlib.import_module(f"experiments.gpu_proof.{module}"), function)
    measure(Job(SCALES[device], writer(results / f"{name}.jsonl"), results, name))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
