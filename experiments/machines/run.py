"""Measure this machine three times and add its row to the table of machines.

python experiments/machines/run.py                                      # the embedded pair
python experiments/machines/run.py pair=qwen3_8b hardware=two_gpus      # keys of `amusd compare`
python experiments/machines/run.py --table                              # only make the table again
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

import argparse
import datetime as dt
import json
import statistics
from collections.abc import Sequence

from amusd.errors import ConfigError
from experiments.common import Document, run_amusd, without_folders
from experiments.request import ROOT

FOLDER = ROOT / "experiments" / "machines"
NUM_RUNS = 3
SETTINGS = ("workload.num_prompts=16", "sampling.max_new_tokens=64")
NAMES = ("machine", "pair", "commit")
FIGURES = ("autoregressive", "synchronous", "asynchronous", "ratio", "acceptance_length")
COLUMNS = ("machine", "pair", "plain", "best synchronous", "asynchronous", "ratio", "acceptance length", "identical")
MARK = "<!-- made from rows.jsonl -->"


def main() -> None:
    """Read the command line, measure, write the row and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="of `amusd compare`")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    arguments = parser.parse_args()
    try:
        if not arguments.table:
            add_row(FOLDER, measured(arguments.keys), arguments.keys)
        write_table(FOLDER)
    except ConfigError as error:
        parser.exit(2, f"{error}\n")


def measured(keys: Sequence[str]) -> list[Document]:
    """Run the comparison several times; return the results."""
    runs = ROOT / "runs" / f"machines-{dt.datetime.now().astimezone():%Y-%m-%d-%H%M%S}"
    return [run_amusd("compare", [*SETTINGS, *keys], runs / str(number)) for number in range(NUM_RUNS)]


def add_row(folder: Path, results: Sequence[Document], keys: Sequence[str]) -> None:
    """Append the medians of the runs to `rows.jsonl`. Raises `ConfigError` if they are no row."""
    summaries = [result["summary"] for result in results]
    if not all(summaries):
        raise ConfigError("no row: a row has plain, synchronous and asynchronous decoding, one answer at a time")
    row = {name: summaries[0][name] for name in NAMES}
    if any({name: summary[name] for name in NAMES} != row for summary in summaries):
        raise ConfigError(f"no row: {', '.join(NAMES)} changed from run to run")
    row |= {name: statistics.median(summary[name] for summary in summaries) for name in FIGURES}
    same = [mode["identical_to_autoregressive"] for result in results for mode in result["rows"]]
    counts = [sum(one[name] for one in same if one) for name in ("num_identical", "num_prompts")]
    row |= {"identical": "/".join(map(str, counts)), "date": results[0]["environment"]["date"]}
    row |= {"runs": len(results), "keys": without_folders([*SETTINGS, *keys])}
    with (folder / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def write_table(folder: Path) -> None:
    """Write the table of `rows.jsonl` to the end of the README."""
    readme = folder / "README.md"
    kept, mark, _ = readme.read_text(encoding="utf-8").partition(MARK)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    readme.write_text(f"{kept}{mark}\n\n{table_of(rows)}\n", encoding="utf-8")


def table_of(rows: Sequence[Document]) -> str:
    """The rows in Markdown, by pair, the best ratio first."""
    ordered = sorted(rows, key=lambda row: (row["pair"], -row["ratio"]))
    lines = [
        (
            *(row["machine"], row["pair"]),
            *(f"{row[name]:.1f}" for name in FIGURES[:3]),
            *(f"{row[name]:.2f}" for name in FIGURES[3:]),
            *(row["identical"], f"{row['date']}, {row['commit'][:8]}{row['commit'][40:]}"),
        )
        for row in ordered
    ]
    header = (*COLUMNS, "date, commit")
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *lines])


if __name__ == "__main__":
    main()
