"""Compare all drafters of one target: cost, acceptance and speed.

    python experiments/drafters/compare.py --drafter eagle:EAGLE/ --drafter medusa:HEADS/ --prompts FILE

Greedily and at temperature 0.7, every drafter drafts synchronously and, where it can, asynchronously. Chains of six
show acceptance by distance from the last token whose features the drafter knows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from amusd.checkpoints.draft_layouts import read_published
from amusd.checkpoints.embedded_target import embedded_target_path
from amusd.config import CAPABILITIES
from amusd.console import table
from experiments.common import Document, compare, write_jobs
from experiments.plotting import run
from experiments.request import Request, parser_of

DISTANCES = 6


def main() -> None:
    """Run the script."""
    parser = parser_of("drafters", __doc__, num_prompts=32, num_tokens=64)
    parser.add_argument("--drafter", action="append", default=[], help="KIND or KIND:FOLDER beside `embedded`")
    parser.add_argument("--lengths", default="2,3,4", help="tokens of blocks, and steps of trees, that are tried")
    run(parser, measure)


def measure(request: Request, arguments: argparse.Namespace) -> None:
    """Run two sweeps of `amusd compare`, and print a table of both."""
    names = ["embedded", *arguments.drafter]
    drafters = f"compare.drafters=[{','.join(names)}]"
    temperatures = f"sampling.temperature={'0' if request.quick else '0,0.7'}"
    lengths = f"compare.synchronous_lengths=[{'2' if request.quick else arguments.lengths}]"
    workload = request.workload()
    speeds = compare([drafters, temperatures, lengths, "compare.trees=true", *workload], request.runs / "speed")
    chains = ["mode=synchronous", f"num_speculative_tokens={DISTANCES}"]
    positions = compare([drafters, temperatures, *chains, *workload], request.runs / "distance")
    steps = draft_steps(request.runs / "distance", positions)
    pairs = zip(speeds, positions, strict=True)
    rows = [row_of(name, job, by_position, steps) for job, by_position in pairs for name in names]
    print(table(HEADER, [cells(row) for row in rows]))
    write_jobs(request, speeds, drafters=rows)


HEADER = ("T", "drafter", "MB", "step ms", "accepted by distance", "bytes", "plain", "best sync", "async", "async/sync")


def row_of(name: str, job: Document, by_position: Document, steps: dict[str, float]) -> Document:
    """The figures of one drafter at one temperature."""
    kind, _, folder = name.partition(":")
    rows = {row["mode"]: row for row in job["rows"] if row["drafter"] in (None, kind)}
    chain = next(row for row in by_position["rows"] if row["drafter"] == kind)
    best, asynchronous = rows["synchronous"], rows.get("asynchronous")
    needs_features = CAPABILITIES[kind].needs_features
    width = read_published(folder, embedded_target_path(), kind).features.width if needs_features else 0
    return {
        "temperature": float(job["settings"].get("sampling.temperature", 0)),
        "drafter": kind,
        "megabytes": sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) / 1e6 if folder else None,
        "step_ms": steps[kind],
        "accepted_by_distance": conditional(chain["acceptance_by_position"]),
        "feature_bytes_per_pass": 2 * width * best["tokens_per_verification"],
        "plain": rows["autoregressive"]["tokens_per_second"],
        "synchronous": best["tokens_per_second"],
        "block": f"{best['num_speculative_tokens']}{' as a tree' if best['tree'] else ''}",
        "asynchronous": None if asynchronous is None else asynchronous["tokens_per_second"],
    }


def conditional(shares: list[float]) -> list[float]:
    """For each position, how often its candidate is accepted if those before it are."""
    return [share / before for before, share in zip([1.0, *shares], shares, strict=False) if before]


def draft_steps(folder: Path, jobs: list[Document]) -> dict[str, float]:
    """Median milliseconds of a step of each drafter, from the drafts' events."""
    kinds: dict[int, str] = {}
    found: dict[str, list[float]] = {}
    for number in range(len(jobs)):
        text = (folder / str(number) / "events" / "draft.jsonl").read_text(encoding="utf-8")
        events = (json.loads(line) for line in text.splitlines())
        steps: list[dict[str, Any]] = []
        for event in events:
            if event["name"] == "draft_step":
                steps.append(event)
            elif event["name"] == "sequence":
                kinds[event["sequence_id"]] = event["drafter"]
        for event in steps:
            tokens = max(1, event["num_tokens"])
            kind = kinds[event["sequence_id"]]
            found.setdefault(kind, []).append((event["end_ns"] - event["start_ns"]) / 1e6 / tokens)
        kinds.clear()
    return {kind: statistics.median(times) for kind, times in found.items()}


def cells(row: Document) -> tuple[str, ...]:
    """For the terminal."""
    asynchronous = row["asynchronous"]
    return (
        f"{row['temperature']:g}",
        row["drafter"],
        "" if row["megabytes"] is None else f"{row['megabytes']:.1f}",
        f"{row['step_ms']:.2f}",
        " ".join(f"{share:.2f}" for share in row["accepted_by_distance"]),
        f"{row['feature_bytes_per_pass']:.0f}",
        f"{row['plain']:.1f}",
        f"{row['synchronous']:.1f} ({row['block']})",
        "-" if asynchronous is None else f"{asynchronous:.1f}",
        "-" if asynchronous is None else f"{asynchronous / row['synchronous']:.2f}",
    )


if __name__ == "__main__":
    main()
