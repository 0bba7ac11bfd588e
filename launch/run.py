"""The process that torchrun starts: `torchrun --standalone --nproc-per-node=2 launch/run.py prompt="..."`.

Arguments and exit codes are those of `amusd`; `generate` is the default command.

Ranks 0 to T-1 are the target's. The last rank starts the draft and replaces a lost draft; rank 0 connects to it.

The ranks find each other through torchrun's store. The store holds the address of rank 0 (on one machine a private
folder of socket files) and, with several machines, the device of each rank and the address of the draft. Anybody who
reaches the store's port can read and write it, so the store holds no secret and nothing that is executed. Peers prove
their identity by keys.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import stat
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from amusd.logs import logger

if __name__ == "__main__" and not __package__:  # run as a file: become a module of the folder it lies in (PEP 366)
    _folder = Path(__file__).resolve().parent
    sys.path[0] = str(_folder.parent)
    __package__ = _folder.name
    __import__(__package__)

from amusd.config import EngineConfig, RunConfig
from amusd.errors import ConfigError, PeerLostError, first_line
from amusd.files import make_socket_folder
from amusd.huge_pages import restart_with_huge_pages
from amusd.runtime.cores import allowed_cores, cores_for, pin_to
from amusd.runtime.devices import check_devices, count_gpus, devices_of, link_devices, warn_of_sharing, with_devices
from amusd.runtime.draft_process import DraftProcess, DraftSource
from amusd.runtime.workers import Rendezvous, check_workers
from amusd.tracing.recorder import Recorder
from amusd.transport.addresses import address_towards, check_address, is_loopback
from amusd.transport.factory import address_in

from .compose import compose_config
from .environment import set_environment
from .jobs import Jobs
from .signals import end_of_program, end_with_parent, raise_on_signals

if TYPE_CHECKING:
    from amusd.engine import Engine

COMMANDS = ("generate", "compare", "serve")
STORE_SECONDS = 60.0
"""Longest wait for the store, and for a value that another rank writes to it."""
SILENT_SECONDS = 10.0
"""If the store is silent for longer, the last rank considers rank 0's machine lost."""
ADDRESS = "address"
"""The store's key for rank 0's address. An empty value says that no work is left."""


class RankInfo(NamedTuple):
    """Rank of this process and number of processes: among all of torchrun, and on this machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def is_apart(self) -> bool:
        """Whether there are several machines."""
        return self.local_size != self.size


def rank_info() -> RankInfo:
    """Read torchrun's variables. Raises `ConfigError` without them."""
    try:
        return RankInfo(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))
    except KeyError:
        command = 'torchrun --standalone --nproc-per-node=2 launch/run.py prompt="..."'
        raise ConfigError(f"launch/run.py: start it with {command}, or use the amusd command") from None


def compose(arguments: Sequence[str], own: RankInfo) -> tuple[str, RunConfig]:
    """The command and the configuration. Raises `ConfigError`, alike on all ranks."""
    command, overrides = "generate", list(arguments)
    if {"-m", "--multirun"} & set(overrides):
        raise ConfigError("-m: a sweep starts its own pairs of workers; use `amusd compare -m ...`, not torchrun")
    if overrides and "=" not in overrides[0]:
        command = overrides.pop(0)
    if command not in COMMANDS:
        raise ConfigError(f"{command}: under torchrun the command is one of {', '.join(COMMANDS)}")
    config = compose_config(overrides)
    num_ranks = config.engine().num_ranks
    if own.size != num_ranks:
        ranks = f"the target's target_tensor_parallel_size={num_ranks - 1} ranks and one for the draft"
        raise ConfigError(f"WORLD_SIZE={own.size}: start {num_ranks} processes, one for each of {ranks}")
    link = config.transport
    if own.is_apart:
        if link.address is None or not link.address.startswith("tcp://"):
            needed = f"tcp://HOST:PORT of the first one, where {num_ranks - 1} ports from PORT on are free"
            raise ConfigError(f"transport.address: required on several machines: {needed}")
        check_address(link.address, beyond=link.insecure or link.keys is not None, to_bind=False)
    return command, config


def run(arguments: Sequence[str]) -> int:
    """Do the work of this process; return its exit code. Raises `ConfigError`, `PeerError`."""
    own = rank_info()
    if own.rank > 0:
        logger.setLevel(logging.WARNING)  # rank 0 logs the same lines
    try:
        command, config = compose(arguments, own)
        set_environment(config.hardware.num_threads)
        check_workers(config.engine())
        if not own.is_apart:
            if own.rank == 0:
                warn_of_sharing(config.engine())
            config = dataclasses.replace(config, hardware=with_devices(config.engine()))
    except ConfigError as error:
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun's own report ends with its content
            told = {"message": f"amusd: {error}", "timestamp": int(time.time())}
            Path(file).write_text(json.dumps(told), encoding="utf-8")
        if own.local_rank > 0:  # its local rank 0 reports the same mistake
            return 2
        raise
    from torch.distributed import DistError

    with ExitStack() as stack:
        try:
            return _run_rank(command, config, own, stack)
        except DistError as error:
            raise PeerLostError(
                f"torchrun's store is gone, or a rank did not come to it: {first_line(error)}"
            ) from None


def _run_rank(command: str, config: RunConfig, own: RankInfo, stack: ExitStack) -> int:
    """Run as a rank of the target or as the draft's rank; return the exit code. The caller closes `stack`."""
    from torch.distributed import rendezvous as find_store  # type: ignore[attr-defined]  # missing in __all__

    cores = allowed_cores()
    store, _, _ = next(find_store("env://", timeout=timedelta(seconds=STORE_SECONDS)))
    if own.is_apart:
        config, rendezvous = _rendezvous_apart(store, config, own)
    address = None if own.rank == 0 else store.get(ADDRESS).decode()
    if address == "":  # rank 0 has found that there is nothing to do
        return 0
    if not own.is_apart:
        rendezvous = rendezvous_in(address, stack)
    engine, last = config.engine_for(command), own.size - 1
    if own.rank < last and engine.hardware.devices[own.rank] == "cpu":
        num_here = min(own.local_size, last - (own.rank - own.local_rank))
        pin_to(cores_for("target", cores, engine.hardware, rank=own.local_rank, num_target_ranks=num_here))
    if 0 < own.rank < last:
        from amusd.runtime.startup import run_follower

        run_follower(engine, own.rank, rendezvous)
        return 0
    if own.rank == last:
        if not engine.drafters or engine.draft_address:
            return 0
        logger.setLevel(logging.INFO)  # for the lines of the draft
        return DraftProcess(engine, draft_address(engine, rendezvous), is_own=True).keep_running(
            partial(is_over, store)
        )
    code = _run_target(command, config, rendezvous, store)
    store.set(ADDRESS, "")
    return code


def rendezvous_in(folder: str | None, stack: ExitStack) -> Rendezvous:
    """The ranks' rendezvous in this folder, or in a new folder that `stack` removes.

    Raises `ConfigError` if others may enter the folder.
    """
    if folder is None:
        folder = make_socket_folder("amusd-ranks-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
    status = Path(folder).lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{folder}: torchrun's store names this folder, which is not private to this user")
    return Rendezvous(folder)


def _rendezvous_apart(store: Any, config: RunConfig, own: RankInfo) -> tuple[RunConfig, Rendezvous]:
    address = config.transport.address
    assert address is not None, "`compose` has seen to it"
    host = address_towards(address)
    if is_loopback(host):
        found = f"leads to {host} on the machine of rank {own.rank}, which no other machine can reach (see /etc/hosts)"
        raise ConfigError(f"transport.address={address}: {found}; name the first machine's address in the network")
    here = f"tcp://{f'[{host}]' if ':' in host else host}:{urlsplit(address).port}"  # libzmq binds to no names
    device = own_device(config, own)
    check_devices([device])
    for key, value in (("device", device), ("address", here)):
        store.set(f"{key}/{own.rank}", value)
    devices = [store.get(f"device/{rank}").decode() for rank in range(own.size)]
    first, last = (store.get(f"address/{rank}").decode() for rank in (0, own.size - 1))
    hardware = dataclasses.replace(config.hardware, devices=tuple(devices))
    transport = dataclasses.replace(config.transport, address=last)  # where the draft listens
    return dataclasses.replace(config, hardware=hardware, transport=transport), Rendezvous(first, host, store)


def own_device(config: RunConfig, own: RankInfo) -> str:
    """The device named for this rank, else a GPU of the machine, else `cpu`."""
    if config.hardware.devices:
        return devices_of(config.engine())[own.rank]
    num_gpus = count_gpus()
    return f"cuda:{own.local_rank % num_gpus}" if num_gpus else "cpu"


def _run_target(command: str, config: RunConfig, rendezvous: Rendezvous, store: Any) -> int:
    def make_engine(wanted: EngineConfig, events: str | None) -> Engine:
        from amusd.engine import Engine

        store.set(ADDRESS, rendezvous.address)
        drafts = DraftSource(wanted, draft_address(wanted, rendezvous)) if wanted.drafters else None
        return Engine.connect(wanted, drafts, Recorder("target", events), rendezvous)

    with closing(Jobs(command, make_engine)) as jobs:
        return jobs.run(config)


def draft_address(config: EngineConfig, rendezvous: Rendezvous) -> str:
    """The address at which the draft listens, by default the last rank's."""
    named = config.draft_address or config.transport.address
    return named or address_in(rendezvous.address, config.transport, link_devices(config))


def is_over(store: Any) -> bool:
    """Whether rank 0 is done, or the store has not answered in time.

    Asked in a thread, since a lost machine never answers.
    """
    answers: list[bytes] = []

    def ask() -> None:
        with suppress(RuntimeError):
            answers.append(store.get(ADDRESS))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(SILENT_SECONDS)
    return not any(answers)


def main(arguments: Sequence[str]) -> int:
    """Run this process; return its exit code."""

    def work() -> int:
        raise_on_signals()
        end_with_parent()
        return run(arguments)

    return end_of_program(work)


if __name__ == "__main__":
    restart_with_huge_pages()
    sys.exit(main(sys.argv[1:]))
