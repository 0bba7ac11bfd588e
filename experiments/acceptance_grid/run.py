"""From which acceptance on overlap pays: a draft of known cost that is right with a chosen probability."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from experiments.common import run, run_sweep
from experiments.request import parser_of, request_of


def main() -> None:
    """One sweep of `amusd compare`."""
    parser = parser_of("acceptance_grid", __doc__, num_prompts=8, num_tokens=96)
    request = request_of(parser.parse_args())
    accepts = "0.5,0.9" if request.quick else "0.3,0.5,0.6,0.7,0.8,0.9,0.95"
    lengths = "[2]" if request.quick else "[1,2,4,6]"
    run_sweep(
        request,
        [
            "experiment=acceptance_grid",
            f"accept={accepts}",
            "compare.policies=[chain,windowed,branching,auto]",
            "num_speculative_tokens=7",  # of a window: what the draft makes in a pass, and a pass can take
            f"compare.synchronous_lengths={lengths}",
        ],
    )


if __name__ == "__main__":
    run(main)
