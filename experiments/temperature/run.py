"""The cost of sampling for each way to decode: temperatures from 0 to 1.5, candidates accepted by matching."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from experiments.lines import sweep

if __name__ == "__main__":
    sweep(
        "temperature",
        __doc__,
        "sampling.temperature",
        "temperature (no unit)",
        values="0,0.3,0.7,1.0,1.5",
        quick_values="0,1.0",
        lengths="1,2,3,4",
        policies="chain,branching,auto",
    )
