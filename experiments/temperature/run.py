"""What sampling costs each way to decode: temperatures from 0 to 1.5, candidates accepted by matching."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from experiments.common import run, run_sweep
from experiments.request import parser_of, request_of


def main() -> None:
    """One sweep of `amusd compare`."""
    parser = parser_of("temperature", __doc__, num_prompts=16, num_tokens=96)
    request = request_of(parser.parse_args())
    temperatures = "0,1.0" if request.quick else "0,0.3,0.7,1.0,1.5"
    lengths = "[2]" if request.quick else "[1,2,3,4]"
    run_sweep(
        request,
        [
            "experiment=temperature",
            f"sampling.temperature={temperatures}",
            "compare.policies=[chain,branching,auto]",
            f"compare.synchronous_lengths={lengths}",
        ],
    )


if __name__ == "__main__":
    run(main)
