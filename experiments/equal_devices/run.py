"""Every use of two devices on the same prompts, greedy and at temperature 0.7, and what the simulator says of each.

A pair of target and draft, both devices on each pass, and an engine on each device; by plain and synchronous decoding,
and as a pair by `auto`. Each row is also predicted, from the times and outcomes of the same run.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from collections.abc import Mapping, Sequence
from typing import Any

from amusd.commands.tables import row_name
from amusd.console import table
from experiments.common import Document, compare, read_json, run, run_amusd, write_results
from experiments.request import parser_of, request_of


def main() -> None:
    """A sweep of `amusd compare`, a simulation of each of its jobs, and a table of both."""
    parser = parser_of("equal_devices", __doc__, num_prompts=16, num_tokens=64)
    request = request_of(parser.parse_args())
    lengths = "[2]" if request.quick else "[1,2,3,4]"
    jobs = compare(
        [
            "compare.equal_devices=true",
            f"compare.synchronous_lengths={lengths}",
            "sampling.temperature=0,0.7",
            "sampling.seed=1",
            *request.workload(),
        ],
        request.runs / "sweep",
    )
    for job, entry in zip(jobs, read_json(request.runs / "sweep" / "sweep.json")["jobs"], strict=True):
        run_dir = request.runs / "sweep" / str(entry["job"])
        given = [f"calibration={run_dir}", f"simulate.synchronous_lengths={lengths}", "simulate.min_candidates=[1]"]
        predicted = run_amusd("simulate", given, request.runs / f"predicted_{entry['job']}")
        both = [*given, "simulate.batch_size=2"]  # an answer for each replica
        of_replicas = run_amusd("simulate", both, request.runs / f"predicted_{entry['job']}_replicas")
        job["equal_devices"] = {
            name: predicted["equal_devices"][name]
            for name in ("rank_speedup", "draft_rank_speedup", "speedups", "gain")
        }
        job["predictions"] = predictions(job["rows"], predicted, of_replicas)
    print(predictions_text(jobs))
    kept = [{name: value for name, value in job.items() if name != "machine"} for job in jobs]
    write_results(request, jobs[0]["machine"], {"jobs": kept})


def predictions(
    rows: Sequence[Mapping[str, Any]], predicted: Mapping[str, Any], of_replicas: Mapping[str, Any]
) -> list[Document]:
    """Measured and predicted tokens per second of each row, and the relative error.

    `predicted`: of one answer at a time. `of_replicas`: of two, one for each replica.
    """
    ranks = [row for row in predicted["equal_devices"]["rows"] if row["use"] == "rank"]
    replicas = [row for row in of_replicas["equal_devices"]["rows"] if row["use"] == "replica"]
    simulated = {
        (layout, row["mode"], row["policy"], row["num_speculative_tokens"]): row["tokens_per_second"]
        for layout, of_layout in (("pair", predicted["rows"]), ("ranks", ranks), ("replicas", replicas))
        for row in of_layout
        if row["policy"] in (None, "auto")
    }
    found = []
    for row in rows:
        expected = simulated[row["layout"], row["mode"], row["policy"], row["num_speculative_tokens"]]
        measured = row["tokens_per_second"]
        found.append(
            {
                "row": row_name(row),
                "layout": row["layout"],
                "num_devices": row["num_devices"],
                "measured": measured,
                "per_device": row["tokens_per_second_per_device"],
                "predicted": expected,
                "error": expected / measured - 1,
            }
        )
    return found


def predictions_text(jobs: Sequence[Document]) -> str:
    """A line for each row of each job."""
    lines = [
        (
            job["settings"]["sampling.temperature"],
            one["row"],
            f"{one['measured']:.1f}",
            f"{one['per_device']:.1f}",
            f"{one['predicted']:.1f}",
            f"{100 * one['error']:+.0f} %",
        )
        for job in jobs
        for one in job["predictions"]
    ]
    return table(("temperature", "mode", "tokens/s", "per device", "simulated", "error"), lines)


if __name__ == "__main__":
    run(main)
