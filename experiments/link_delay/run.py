"""What distance costs: every message takes 0 to 30 ms longer, in both directions."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from experiments.lines import sweep

if __name__ == "__main__":
    sweep(
        "link_delay",
        __doc__,
        "transport.delay_ms",
        "added delay of a message, one way (ms)",
        values="0,1,5,10,30",
        quick_values="0,10",
        lengths="1,2,4,7",
        policies="chain,branching,auto",
    )
