"""The processes that torchrun or `two_nodes.sh` starts: who has come, and which ranks of the target each looks after.

The first process is the target's, and the last one the draft's. On one machine the ranks of the target are shared
evenly by all but the last: 2 processes are one for each role, and with as many as the target has ranks and one more
each has its own. On two machines there are 2 processes. A process starts the ranks that it looks after
(`amusd/runtime/followers.py`).
"""

from __future__ import annotations

import dataclasses
import time
from contextlib import nullcontext
from dataclasses import dataclass

from amusd import __version__
from amusd.config import TransportConfig
from amusd.console import tell, waiting_for
from amusd.errors import ConfigError, PeerLostError

from .job import Group, Options
from .store import CONNECT_SECONDS, Place, Store

_JOB_SECONDS = 2 * CONNECT_SECONDS
"""Longest wait for the job, where the target awaits all others first."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process of the run, as it says itself."""

    num_gpus: int
    amusd: str
    """Version."""


def own_member() -> Member:
    """This process. Imports torch."""
    from amusd.runtime.devices import count_gpus

    return Member(num_gpus=count_gpus(), amusd=__version__)


def join(place: Place, secret: bytes) -> Store:
    """The store, for another process than the first one, which is told there that this one has come."""
    is_waiting = place.is_away and place.is_by_itself
    machine = f"the target's machine (NODE_RANK=0) at {place.endpoint}"
    with waiting_for(machine, CONNECT_SECONDS) if is_waiting else nullcontext():
        store = Store(place, secret)
    store.put(here(place.rank), dataclasses.asdict(own_member()))
    return store


def here(rank: int) -> str:
    """The name under which a process says that it has come."""
    return f"here/{rank}"


def left(rank: int) -> str:
    """The name under which it says that it needs the store no more."""
    return f"left/{rank}"


def await_members(place: Place, store: Store, timeout: float) -> list[Member]:
    """The other processes, once they have come; the draft's is the last one.

    Raises `ConfigError` where one does not come within `timeout` seconds, or is of another version.
    """
    deadline = time.monotonic() + timeout
    members: list[Member] = []
    whom = f"the draft's machine (NODE_RANK=1) at {place.endpoint}"
    with waiting_for(whom, timeout) if place.is_by_itself and place.apart else nullcontext():
        for rank in range(1, place.size):
            try:
                values = store.get(here(rank), max(0.01, deadline - time.monotonic()))
            except PeerLostError:
                absent = "nobody else" if place.apart else f"no rank {rank}"
                then = "; the same line is to run on the draft's machine, with NODE_RANK=1" if place.apart else ""
                raise ConfigError(f"{place.endpoint}: {absent} came within {timeout:g} seconds{then}") from None
            members.append(Member(**values))
            if members[-1].amusd != __version__:
                raise ConfigError(f"rank {rank} has amusd {members[-1].amusd}, and rank 0 has {__version__}")
    return members


def ranks_of(rank: int, num_processes: int, num_target_ranks: int) -> range:
    """The target's ranks that a process looks after; none for the last one. Raises `ConfigError`."""
    num_hosts = num_processes - 1
    each, left_over = divmod(num_target_ranks, num_hosts)
    if left_over or not each:
        raise ConfigError(
            f"target_tensor_parallel_size={num_target_ranks}: {num_processes} processes were started, the last one for "
            f"the draft; start {num_target_ranks + 1} in all, one for each rank of the target, or 2, or a number "
            "between by which each has as many"
        )
    return range(rank * each, (rank + 1) * each) if rank < num_hosts else range(0)


def own_transport(options: Options) -> TransportConfig:
    """The link as this process's own arguments describe it. Raises `ConfigError`."""
    from .compose import compose_config

    return compose_config(options.overrides).transport


def told_group(place: Place, store: Store) -> Group | int:
    """The group of jobs that the target tells, or this process's exit code where there is nothing to do."""
    with waiting_for("the target's job", _JOB_SECONDS) if place.is_away else nullcontext():
        told = store.get("group", _JOB_SECONDS)
    if isinstance(told, str):
        return Group.from_text(told)
    if place.is_away:
        tell(f"the target's machine says: {told['line']}")
    return int(told["exit_code"]) if place.is_away else 0


def tell_no_group(store: Store, line: str, exit_code: int) -> None:
    """There is nothing to do for the others, and why; their exit code on other machines."""
    store.put("group", {"line": line, "exit_code": exit_code})
    store.put("finished", True)  # those that have come late wait for this
