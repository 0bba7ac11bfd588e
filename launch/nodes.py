"""The processes that torchrun starts, over the machines of a run: who has come, and which ranks each one looks after.

The first process is the target's, and the last one the draft's. The ranks of the target are shared evenly by all but
the last: 2 processes are one for each role, and with as many as the target has ranks and one more each has its own. A
process starts the ranks that it looks after, on its machine, as on a single one (`amusd/runtime/followers.py`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby, islice

from amusd import __version__
from amusd.config import EngineConfig, RunConfig, TransportConfig
from amusd.console import tell, waiting_for
from amusd.errors import ConfigError, PeerLostError
from amusd.runtime.placement import Node, devices_on
from amusd.transport.addresses import address_towards

from .job import Group, Options
from .store import CONNECT_SECONDS, Place, Store

_JOB_SECONDS = 2 * CONNECT_SECONDS
"""Longest wait for the job, where the target awaits all others first."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A process of the run, as it says itself."""

    rank: int
    """torchrun's."""
    node: int
    """Rank of the first process on its machine, which stands for the machine."""
    host: str
    """The address of its machine that the first process sees."""
    num_gpus: int
    amusd: str
    """Version."""
    torch: str
    """Version."""


def own_member(place: Place) -> Member:
    """This process. Imports torch. Raises `ConfigError` where the first process's machine has no address."""
    import torch

    from amusd.runtime.devices import count_gpus

    return Member(
        rank=place.rank,
        node=place.node,
        host=own_host(place),
        num_gpus=count_gpus(),
        amusd=__version__,
        torch=str(torch.__version__),
    )


def own_host(place: Place) -> str:
    """The address of this machine that the first process's machine sees. Raises `ConfigError`."""
    try:
        return address_towards(place.address.strip("[]"), place.port)
    except OSError as error:
        raise ConfigError(f"{place.endpoint}: there is no way to it from here ({error})") from None


def join(place: Place, secret: bytes) -> Store:
    """The store, for another process than the first one, which is told there that this one has come."""
    is_waiting = place.is_away and place.is_by_itself
    machine = f"the target's machine (NODE_RANK=0) at {place.endpoint}"
    with waiting_for(machine, CONNECT_SECONDS) if is_waiting else nullcontext():
        store = Store(place, secret)
    store.put(here(place.rank), dataclasses.asdict(own_member(place)))
    return store


def here(rank: int) -> str:
    """The name under which a process says that it has come."""
    return f"here/{rank}"


def left(rank: int) -> str:
    """The name under which it says that it needs the store no more."""
    return f"left/{rank}"


def await_members(place: Place, store: Store, timeout: float) -> list[Member]:
    """All processes, once they have come. Raises `ConfigError` where one does not within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    members = [own_member(place)]
    is_pair = place.size == 2
    whom = "the draft's machine (NODE_RANK=1)" if is_pair else f"the other {place.size - 1} processes"
    telling = place.is_by_itself and place.apart
    with waiting_for(f"{whom} at {place.endpoint}", timeout) if telling else nullcontext():
        try:
            for rank in range(1, place.size):
                values = store.get(here(rank), max(0.01, deadline - time.monotonic()))
                members.append(Member(**values))
        except PeerLostError:
            absent = "nobody else" if is_pair else f"no rank {len(members)} of 0 to {place.size - 1}"
            where = "the draft's machine, with NODE_RANK=1" if is_pair else "every machine, with its --node-rank"
            raise ConfigError(
                f"{place.endpoint}: {absent} came within {timeout:g} seconds; the same line is to run on {where}"
            ) from None
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


def nodes_of(members: Sequence[Member], config: EngineConfig) -> list[Node]:
    """The machines. Raises `ConfigError` where the processes cannot share the target, or are not of one version."""
    size = len(members)
    for member in members:
        counted = ("amusd", "torch") if member.rank < size - 1 else ("amusd",)  # the draft may have another torch
        for name in counted:
            own, other = getattr(members[0], name), getattr(member, name)
            if own != other:
                raise ConfigError(f"rank {member.rank} on {member.host} has {name} {other}, and rank 0 has {own}")
    nodes = []
    for number, (_, group) in enumerate(groupby(members, key=lambda member: member.node)):
        there = list(group)
        num_target_ranks = sum(len(ranks_of(member.rank, size, config.target_tensor_parallel_size)) for member in there)
        nodes.append(
            Node(
                name=f"node {number} ({there[0].host})",
                num_gpus=there[0].num_gpus,
                num_target_ranks=num_target_ranks,
                num_draft_ranks=int(there[-1] is members[-1]),
            )
        )
    return nodes


def has_ranks_elsewhere(nodes: Sequence[Node]) -> bool:
    """Whether ranks of the target are on several machines."""
    return sum(node.num_target_ranks > 0 for node in nodes) > 1


def check_sharing(nodes: Sequence[Node], devices: Sequence[str]) -> None:
    """Raise `ConfigError` where ranks of a target on several machines share a GPU."""
    for node, own in zip(nodes, devices_on(nodes, devices), strict=True):
        gpus = [device for device in own[: node.num_target_ranks] if device != "cpu"]
        if has_ranks_elsewhere(nodes) and len(set(gpus)) < len(gpus):
            raise ConfigError(
                f"{node.name}: {len(gpus)} ranks of the target on {node.num_gpus} GPUs; with ranks on several machines "
                "each needs a GPU of its own, or hardware=cpu for all"
            )


def plan(nodes: Sequence[Node], config: RunConfig) -> Iterator[str]:
    """What runs where, and how it talks, in lines. `config` has the devices."""
    *targets, draft = config.hardware.devices
    found = enumerate(targets)
    for node in nodes:
        for rank, device in islice(found, node.num_target_ranks):
            yield f"{node.name}: rank {rank} of the target on {device}"
        if node.num_draft_ranks:
            yield f"{node.name}: the draft on {draft}"
    link = config.transport
    how = "encrypted" if link.keys is not None else "not encrypted"
    if has_ranks_elsewhere(nodes):
        yield f"commands of rank 0: TCP, {how}; passes: gloo or NCCL over {link.interface}, not encrypted"
    where = "on one machine" if link.address is None else f"{link.address}, {how}"
    yield f"candidates and verdicts: transport={link.kind}, {where}"


def with_interface(transport: TransportConfig, place: Place) -> TransportConfig:
    """The link's settings with the address at which the target's ranks on this machine meet those on others."""
    return dataclasses.replace(transport, interface=transport.interface or own_host(place))


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
