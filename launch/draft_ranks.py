"""How the ranks of a draft find each other, life after life: through torchrun's store, while there is no link.

draft_gathers         incarnation of the last rank's newest process                written by it
draft_pid_R/K         process id of rank R, which has heard of incarnation K       written by that rank
draft_ranks/K         where incarnation K awaits its other ranks                   written by it

A draft of which one rank is lost is lost as a whole. The last rank's process ends then, and the next one gathers the
others again, which outlive it, and of which the lost one has been started anew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from .drafts import OVER
from .store import LOOK_SECONDS, Store

_GATHERS = "draft_gathers"
_READ_SECONDS = 1.0  # for a value that is there


def gather_ranks(store: Store, incarnation: int, size: int, timeout: float) -> list[int] | None:
    """The last rank's: process ids of the draft's `size - 1` others, once all have heard of this incarnation.

    None when no draft is wanted any more. Raises `PeerLostError` after `timeout` seconds for one of them.
    """
    pids = []
    if size > 1:
        store.put(_GATHERS, incarnation)
    for rank in range(1, size):
        name = _pid_of_rank(rank, incarnation)
        if store.await_any((name, *OVER), timeout) != name:
            return None
        pids.append(int(store.get(name, _READ_SECONDS)))
    return pids


def addresses(store: Store, rank: int) -> Iterator[str]:
    """Another rank's: where each incarnation awaits it, one after another, as long as drafts are wanted.

    Raises `PeerLostError` when the store is gone.
    """
    heard = told = 0
    while not _is_over(store):
        newest = int(store.get(_GATHERS, _READ_SECONDS)) if store.has(_GATHERS) else 0
        if newest > heard:
            store.put(_pid_of_rank(rank, newest), os.getpid())
            heard = newest
        if heard > told and store.has(address_of(heard)):
            told = heard
            yield store.get(address_of(heard), _READ_SECONDS)
        else:
            time.sleep(LOOK_SECONDS)


def _is_over(store: Store) -> bool:
    return any(store.has(name) for name in OVER)


def _pid_of_rank(rank: int, incarnation: int) -> str:
    return f"draft_pid_{rank}/{incarnation}"


def address_of(incarnation: int) -> str:
    """Under which name it is told where this incarnation awaits the other ranks."""
    return f"draft_ranks/{incarnation}"
