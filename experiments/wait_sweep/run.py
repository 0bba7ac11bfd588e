"""How many candidates the target should wait for where the draft starts anew: `min_candidates` from 0 to 4."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from experiments.common import run, run_sweep
from experiments.request import parser_of, request_of


def main() -> None:
    """One sweep of `amusd compare`."""
    parser = parser_of("wait_sweep", __doc__, num_prompts=16, num_tokens=96)
    request = request_of(parser.parse_args())
    waits = "0,2" if request.quick else "0,1,2,3,4"
    lengths = "[2]" if request.quick else "[1,2,3,4]"
    run_sweep(
        request,
        [
            "experiment=wait_sweep",
            f"min_candidates={waits}",
            "compare.policies=[chain,branching]",
            f"compare.synchronous_lengths={lengths}",
        ],
    )


if __name__ == "__main__":
    run(main)
