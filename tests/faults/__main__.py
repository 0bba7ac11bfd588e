"""Run one seed again and print its log; or survey many; or find every mutant. See `python -m tests.faults --help`."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as in conftest.py

from faults.mutants import MUTANTS, find
from faults.simulation import run
from faults.survey import NUM_SEEDS, survey


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("what", help="a seed; 'survey'; 'mutants'")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="how many a survey runs, or a mutant may take")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)  # each damaged frame would have its warning
    if arguments.what == "survey":
        found = survey(range(arguments.seeds))
        sys.stdout.write(f"{found}\n")
        return bool(found.violations)
    if arguments.what == "mutants":
        sys.stdout.write("| mutant | seeds | what broke |\n| --- | --- | --- |\n")
        for name, mutant in MUTANTS.items():
            taken = find(mutant, arguments.seeds)
            sys.stdout.write(f"| `{name}` | {taken.num_seeds} | {taken.rule} |\n" if taken else f"| `{name}` | | |\n")
        return 0
    report = run(int(arguments.what))
    sys.stdout.write(report.log)
    return report.violation is not None


if __name__ == "__main__":
    sys.exit(main())
