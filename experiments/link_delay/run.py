"""What distance costs: every message takes 0 to 30 ms longer, in both directions."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from experiments.common import run, run_sweep
from experiments.request import parser_of, request_of


def main() -> None:
    """One sweep of `amusd compare`."""
    parser = parser_of("link_delay", __doc__, num_prompts=16, num_tokens=96)
    request = request_of(parser.parse_args())
    delays = "0,10" if request.quick else "0,1,5,10,30"
    lengths = "[2]" if request.quick else "[1,2,4,7]"
    run_sweep(
        request,
        [
            "experiment=link_delay",
            f"transport.delay_ms={delays}",
            "compare.policies=[chain,branching,auto]",
            f"compare.synchronous_lengths={lengths}",
        ],
    )


if __name__ == "__main__":
    run(main)
