"""A second rank of a small model, as a process: `nccl_rank.py FOLDER DEVICE BACKEND CAPTURES NUM_COMMANDS`.

It follows rank 0. With NUM_COMMANDS, it obeys this many commands and kills itself at the next one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).parents[1]))

from models.linked_ranks import come
from models.test_decoder import Case, lean_model, stock_model

from amusd.checkpoints.loading import capture_for
from amusd.models.numerics import Numerics
from amusd.models.sharding import ALONE, Ranks
from amusd.runner.model_runner import ModelRunner
from amusd.runtime.ranks import follow
from amusd.transport.torch_distributed import Backend

DEADLINE_SECONDS = 120.0
STEPS = 4


def small_model(device: str, *, captures: bool, ranks: Ranks = ALONE) -> ModelRunner:
    return lean_model(
        stock_model(Case("Qwen3Config", {"num_attention_heads": 8, "num_key_value_heads": 4})),
        Numerics.for_device(device, width=8, fixed=True),
        device=device,
        capture=capture_for(device, cuda_graphs=captures),
        tokens_per_step=STEPS if captures else 1,
        ranks=ranks,
    )


def run(folder: str, device: str, backend: str, captures: str, num_commands: str = "") -> None:
    follower = come(Path(folder), 1, 2, cast("Backend", backend))

    def commands() -> Iterator[bytes]:
        for number, command in enumerate(follower.commands()):
            if num_commands and number == int(num_commands):
                os.kill(os.getpid(), signal.SIGKILL)
            yield command

    model = small_model(device, captures=bool(int(captures)), ranks=follower)
    follower.ready(device, DEADLINE_SECONDS)
    follow(model, commands())
    follower.close()


if __name__ == "__main__":
    run(*sys.argv[1:])
