"""A rank that is a process, and kills itself: `rank_process.py follower ADDRESS` or `rank_process.py leader`.

It exchanges one sum for its first command, and is gone before the next one.
"""

from __future__ import annotations

import os
import signal
import sys

import torch

from amusd.models.kv_cache import KVMemory, PreallocatedCache
from amusd.models.passes import Part, Pass
from amusd.models.ranks import Follower, Leader

DEADLINE_SECONDS = 60.0


def follow_and_die(address: str) -> None:
    follower = Follower(address, 1, 2)
    follower.ready("cpu", DEADLINE_SECONDS)
    next(follower.commands())
    follower.sum(torch.ones(1, 1))
    os.kill(os.getpid(), signal.SIGKILL)


def lead_and_die() -> None:
    leader = Leader(2)
    sys.stdout.write(leader.address + "\n")
    sys.stdout.flush()
    leader.await_followers("cpu", DEADLINE_SECONDS)
    part = Part(PreallocatedCache(KVMemory(1, torch.float32), capacity=1, allocated=1), [1])
    leader.announce([part], Pass([part], with_logits=False))
    leader.sum(torch.ones(1, 1))
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if sys.argv[1] == "follower":
        follow_and_die(sys.argv[2])
    else:
        lead_and_die()
