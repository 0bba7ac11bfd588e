"""A rank that is a process, and kills itself: `rank_process.py FOLDER follower|leader`.

It exchanges one sum for its first command, and is gone before the next one.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from models.linked_ranks import DEADLINE_SECONDS, come, lead

from amusd.models.kv_cache import KVCache, KVMemory
from amusd.models.passes import Prefill
from amusd.runtime.ranks import Leader


def announce_pass(leader: Leader) -> None:
    cache = KVCache(KVMemory(1, torch.float32), capacity=1, allocated=1)
    leader.announce(Prefill(cache, [1]), None)


def die(folder: Path, kind: str) -> None:
    if kind == "follower":
        follower = come(folder, 1, 2)
        follower.ready("cpu", DEADLINE_SECONDS)
        next(follower.commands())
        follower.gather(torch.ones(1, 1))
    else:
        leader = lead(folder, 2)
        leader.await_followers("cpu", DEADLINE_SECONDS)
        announce_pass(leader)
        leader.gather(torch.ones(1, 1))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die(Path(sys.argv[1]), sys.argv[2])
