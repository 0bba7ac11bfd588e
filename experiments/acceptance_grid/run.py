"""From which acceptance rate running ahead pays: a draft of known cost that is right with a chosen probability."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

from experiments.lines import sweep

if __name__ == "__main__":
    sweep(
        "acceptance_grid",
        __doc__,
        "accept",
        "acceptance of a single candidate (probability)",
        values="0.3,0.5,0.6,0.7,0.8,0.9,0.95",
        quick_values="0.5,0.9",
        lengths="1,2,4,6",
        policies="chain,windowed,branching,auto",
        more=["num_speculative_tokens=7"],  # tokens of a window, as many as the draft makes during a pass
        num_prompts=8,
    )
