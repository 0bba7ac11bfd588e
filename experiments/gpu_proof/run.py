"""Measure the GPU path part by part. `README.md` says what was expected.

Needs torch, transformers, numpy, msgspec and psutil, on a GPU triton as well: no network, no checkpoint. Each part is a
process with a limit; a part that fails loses nothing of the others. Without a GPU the parts run with small shapes.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # so that `experiments` and `amusd` are those of this checkout

from amusd.errors import ConfigError
from experiments.gpu_proof.plan import CPU, GPU, GROUPS, PARTS, chosen
from experiments.gpu_proof.records import DONE
from experiments.gpu_proof.runner import run_part


def main(arguments: Sequence[str]) -> int:
    """Run the chosen parts and write the report; return 0 if all of them are done, else 1."""
    asked = _parser().parse_args(arguments)
    parts = chosen([name for name in asked.parts.split(",") if name])
    device = asked.device or _device_here()
    name = _name_of(device)
    results = (asked.results or ROOT / "runs" / "gpu_proof" / name).resolve()
    results.mkdir(parents=True, exist_ok=True)
    environment = _environment(device)
    where = "a GPU" if device == GPU else "no GPU: a test of the proof itself, on the CPU with small shapes"
    print(f"{name}: {where}; measurements go to {results}", flush=True)
    all_done = True
    for part in parts:
        print(f"{part.name}: {part.does} (at most {part.limit(device)} s)", flush=True)
        ending = run_part(part, device, results, environment)
        all_done = all_done and ending.status == DONE
        print(f"  {ending.status} in {ending.seconds:.0f} s {ending.reason}".rstrip(), flush=True)
        _report(results, asked.out, name, device)
    print(f"report: {asked.out / name}.md")
    return 0 if all_done else 1


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {part.name:13s} {part.seconds:4d} s  {part.does}" for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="python experiments/gpu_proof/run.py",
        description=__doc__,
        epilog="parts, each with the longest that it may take:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--parts", default="", metavar="A,B", help=f"parts or groups ({', '.join(GROUPS)}); all without it"
    )
    parser.add_argument("--device", choices=(GPU, CPU), help="without it: a GPU where torch sees one")
    parser.add_argument("--results", type=Path, metavar="DIR", help="measurements (default: runs/gpu_proof/DEVICE)")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path(__file__).parent / "results", help="reports")
    return parser


def _device_here() -> str:
    import torch

    return GPU if torch.cuda.is_available() else CPU


def _name_of(device: str) -> str:
    """The device in names of files: `cpu`, `nvidia-h200` ..."""
    if device == CPU:
        return CPU
    import torch

    return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-")


def _environment(device: str) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    return environment | ({"OMP_NUM_THREADS": "1"} if device == CPU else {})


def _report(results: Path, out: Path, name: str, device: str) -> None:
    from experiments.gpu_proof.report import write_report

    write_report(results, out, name, device)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as mistake:
        sys.stderr.write(f"{mistake}\n")
        sys.exit(2)
