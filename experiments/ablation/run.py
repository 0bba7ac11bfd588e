"""What each part of the default is worth: `policy=auto` as it is, and with one part after another left out.

Everything that only changes the schedule is in one run, interleaved prompt by prompt. What changes the models or the
drafter is a run of its own, with plain decoding in it: compare those by their ratio to it, or by tokens per second
where plain decoding itself changes.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from collections.abc import Iterator, Sequence

from amusd.console import table
from experiments.common import Document, compare, middle_half, run, speedups, write_results
from experiments.request import parser_of, request_of

SCHEDULES = {
    "auto": "nothing",
    "branching": "the controller (branching that waits for 2)",
    "chain": "the tree (a chain that waits for 2)",
    "windowed": "the tree, and verifying what is there (windows of 7)",
    "synchronous": "overlap (synchronous, best length)",
}
"""Policy or mode -> what it leaves out."""
CHANGES = {
    "alternatives (a tree of one path)": ("fan_out=1", "rows_per_step=1"),
    "all but one alternative a step (hedges)": ("fan_out=2", "rows_per_step=2"),
    "several paths in one pass": ("verify_breadth=1",),
    "prompt lookup": ("drafter.min_lookup=0",),
    "the fixed width of a pass, and with it exactness": ("verify_width=bucketed",),
    "our decoder of the target": ("target.model_impl=transformers",),
}
"""What is left out -> how."""


def main() -> None:
    """One run for the schedules, one for each change."""
    parser = parser_of("ablation", __doc__, num_prompts=12, num_tokens=96)
    request = request_of(parser.parse_args())
    lengths = "[2]" if request.quick else "[1,2,3,4]"
    schedules = [
        "compare.policies=[chain,windowed,branching,auto]",
        "num_speculative_tokens=7",
        f"compare.synchronous_lengths={lengths}",
    ]
    (first,) = compare([*schedules, *request.workload()], request.runs / "schedules")
    rows = list(rows_of(first, SCHEDULES))
    for number, (left_out, overrides) in enumerate(CHANGES.items()):
        settings = ["compare.policies=[auto]", "compare.synchronous_lengths=[2]", *overrides]
        (job,) = compare([*settings, *request.workload()], request.runs / str(number))
        rows += rows_of(job, {"auto": left_out})
    print(rows_text(rows))
    write_results(request, first["machine"], {"rows": rows})


def rows_of(job: Document, names: dict[str, str]) -> Iterator[Document]:
    """A row for each way to decode that has a name, in the order of the names."""
    plain, *others = job["rows"]
    by_name = {row["policy"] or row["mode"]: row for row in others}
    for name, left_out in names.items():
        row = by_name[name]
        lower, median, upper = middle_half(speedups(job["per_prompt"], row["contestant"]))
        identity = row["identical_to_autoregressive"]
        yield {
            "left_out": left_out,
            "command": job["command"],
            "speedup": median,
            "quartiles": [lower, upper],
            "tokens_per_second": row["tokens_per_second"],
            "plain_tokens_per_second": plain["tokens_per_second"],
            "mean_acceptance_length": row["mean_acceptance_length"],
            "num_identical": identity["num_identical"],
            "num_prompts": identity["num_prompts"],
        }


def rows_text(rows: Sequence[Document]) -> str:
    """A line for each part."""
    lines = [
        (
            row["left_out"],
            f"{row['speedup']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['plain_tokens_per_second']:.1f}",
            f"{row['mean_acceptance_length']:.2f}",
            f"{row['num_identical']}/{row['num_prompts']}",
        )
        for row in rows
    ]
    return table(("left out", "x plain", "tokens/s", "plain", "tokens/pass", "identical"), lines)


if __name__ == "__main__":
    run(main)
