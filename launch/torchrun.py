"""What a process of torchrun does: ranks 0 to T-1 are the target's, the last one looks after the draft's process.

Each process composes the configuration from its own arguments, which are the same. They find each other by torchrun's
store, which anybody who reaches its port can read and write. So it holds no secret, and nothing that would be run: on
one machine the folder of their socket files, which has to be private; on several, whose addresses and keys are
arguments, the device of each rank. All else goes over ZeroMQ (`numbered_link`): commands to the target's other ranks,
and orders to the last rank, whose end does not end the target.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from amusd.config import EngineConfig, RunConfig
from amusd.console import Console, tell
from amusd.errors import ConfigError, PeerLostError, PeerProtocolError, first_line
from amusd.models.meeting import Meeting
from amusd.runtime.cores import allowed_cores, cores_for, pin_to
from amusd.runtime.devices import check_devices, count_gpus, devices_of, settle_devices
from amusd.runtime.draft_process import DraftProcess
from amusd.runtime.followers import Followers
from amusd.runtime.placement import place
from amusd.transport.addresses import address_towards, parse_endpoint
from amusd.transport.base import Rendezvous
from amusd.transport.factory import numbered_link
from amusd.transport.zeromq import ZeroMQTransport
from amusd.types import Role

from .devices import set_environment
from .jobs import Jobs
from .run_directory import write_workers

if TYPE_CHECKING:
    from amusd.engine import Engine

T = TypeVar("T")

COMMANDS = ("generate", "compare", "serve")
STORE_SECONDS = 60.0
"""Longest wait for the store, and for what another rank puts there."""
LOOK_SECONDS = 0.02
"""How often the store is looked at, and the last rank looks after the draft's process."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of this process among those of torchrun."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    """Processes on this machine."""

    @property
    def is_last(self) -> bool:
        """Whether this process looks after the draft."""
        return self.rank == self.size - 1

    @property
    def is_apart(self) -> bool:
        """Whether there are several machines."""
        return self.local_size != self.size


def place_from_environment() -> Place:
    """Read torchrun's variables. Raises `ConfigError` when it did not start this process."""
    try:
        rank, size, local_rank, local_size = (
            int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
    except KeyError:
        raise ConfigError(
            'launch/run.py: start it with torchrun --standalone --nproc-per-node=2 launch/run.py prompt="...", '
            "or use the amusd command"
        ) from None
    return Place(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


def compose(arguments: Sequence[str], own: Place) -> tuple[str, RunConfig]:
    """The command (by default `generate`) and the configuration. Raises `ConfigError`, alike on all ranks."""
    from .compose import compose_config

    command, overrides = "generate", list(arguments)
    if {"-m", "--multirun"} & set(overrides):
        raise ConfigError("-m: a sweep starts its own pairs of workers; use `amusd compare -m ...`, not torchrun")
    if overrides and "=" not in overrides[0]:
        command = overrides.pop(0)
    if command not in COMMANDS:
        raise ConfigError(f"{command}: under torchrun the command is one of {', '.join(COMMANDS)}")
    config = compose_config(overrides)
    num_ranks = config.engine().num_ranks
    if own.size not in (2, num_ranks):
        raise ConfigError(
            f"WORLD_SIZE={own.size}: start {num_ranks} processes, one for each of the target's "
            f"target_tensor_parallel_size={num_ranks - 1} ranks and one for the draft; or 2, of which the first starts "
            "the target's other ranks"
        )
    if not own.is_apart:
        hardware = settle_devices(config.engine(), tell if own.rank == 0 else lambda _line: None)
        return command, dataclasses.replace(config, hardware=hardware)
    link = config.transport
    if link.address is None or not link.address.startswith("tcp://"):
        raise ConfigError(
            "transport.address: required on several machines: tcp://HOST:PORT of the first one, where that port and "
            f"the {num_ranks - 1} behind it are free"
        )
    parse_endpoint(link.address, beyond=link.insecure or link.keys is not None, to_bind=False)
    return command, config


def run(arguments: Sequence[str]) -> int:
    """Do the work of this process; return its exit code. Raises `ConfigError`, `PeerError`."""
    own = place_from_environment()
    try:
        command, config = compose(arguments, own)
    except ConfigError:
        if own.local_rank > 0:  # all ranks read the same arguments: one line on each machine
            return 2
        raise
    return run_rank(command, config, own)


def run_rank(command: str, config: RunConfig, own: Place) -> int:
    """The work of this process; returns its exit code. Raises `ConfigError`, `PeerError`."""
    cores = allowed_cores()
    set_environment(config.engine())
    config, meeting = _meet(config, own)
    engine = config.engine_for(command)
    (rank, *_), here = ranks_of(own, engine.target_tensor_parallel_size)
    if not own.is_last and engine.hardware.devices[rank] == "cpu":
        pin_to(cores_for(Role.TARGET, cores, engine.hardware, rank=rank - here.start, num_target_ranks=len(here)))
    if own.rank == 0:
        return _run_target(command, config, own, meeting, cores)
    if own.is_last:
        _look_after_draft(engine, meeting)
    else:
        from amusd.runtime.startup import run_follower

        run_follower(engine, rank, meeting)
    return 0


def _meet(config: RunConfig, own: Place) -> tuple[RunConfig, Meeting]:
    """The configuration with the device of every rank, and where they meet. Raises `ConfigError`, `PeerLostError`."""
    from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]  # missing in __all__

    try:
        served = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=own.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            timeout=timedelta(seconds=STORE_SECONDS),
            wait_for_workers=False,
        )
        run, attempt = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
        store = PrefixStore(f"amusd/{run}/{attempt}", served)
        if not own.is_apart:
            return config, meet_in_folder(store, own)
        devices = own_devices(config, own)
        check_devices(devices)
        store.set(f"devices/{own.rank}", " ".join(devices))
        everywhere = [device for rank in range(own.size) for device in _get(store, f"devices/{rank}").split()]
    except DistError as error:
        raise PeerLostError(f"torchrun's store cannot be reached: {first_line(error)}") from None
    address = config.transport.address
    assert address is not None, "`compose` has seen to it"
    endpoint = parse_endpoint(address, beyond=True, to_bind=False)
    host = address_towards(endpoint.host, endpoint.port)
    if own.rank == 0:
        address = f"tcp://{host}:{endpoint.port}"  # libzmq binds to no names
    config = dataclasses.replace(
        config,
        hardware=dataclasses.replace(config.hardware, devices=tuple(everywhere)),
        transport=dataclasses.replace(config.transport, address=address),
    )
    return config, Meeting(address=address, host=host, store=store)


def meet_in_folder(store: Any, own: Place) -> Meeting:
    """Where the ranks of one machine meet. Raises `ConfigError` for a folder that others may enter."""
    if own.rank == 0:
        store.set("folder", tempfile.mkdtemp(prefix="amusd-ranks-"))
    folder = _get(store, "folder")
    status = Path(folder).lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{folder}: torchrun's store names this folder, which is not private to this user")
    return Meeting(address=folder)


def _get(store: Any, name: str) -> str:
    """The text of this name, once it is there. Raises `PeerLostError`."""
    deadline = time.monotonic() + STORE_SECONDS
    while not store.check([name]):  # `wait` would hold signals up
        if time.monotonic() >= deadline:
            raise PeerLostError(f"the other ranks said nothing for {STORE_SECONDS:g} seconds ({name})")
        time.sleep(LOOK_SECONDS)
    return bytes(store.get(name)).decode()


def ranks_of(own: Place, num_targets: int) -> tuple[range, range]:
    """The ranks that this process stands for, and those of the target that are on its machine."""
    each = num_targets // (own.size - 1)
    first = own.rank - own.local_rank
    here = range(each * first, each * min(first + own.local_size, own.size - 1))
    return (range(num_targets, num_targets + 1) if own.is_last else range(each * own.rank, each * (own.rank + 1))), here


def own_devices(config: RunConfig, own: Place) -> list[str]:
    """Devices of the ranks that this process stands for: those named, or else of the GPUs of its machine."""
    ranks, here = ranks_of(own, config.target_tensor_parallel_size)
    if config.hardware.devices:
        named = devices_of(config.engine())
        return [named[rank] for rank in ranks]
    placed = place(count_gpus(), len(here))
    return [placed[rank - here.start] for rank in ranks]


# The target's rank 0, and its draft in the care of the last rank


@dataclass(frozen=True)
class Order:
    """What the last rank is to do, as rank 0 says: a method of `DraftProcess`. The run directory is told before."""

    kind: Literal["tell", "met", "dismiss"]
    incarnation: int = 0
    """`tell`: of the draft that is to start."""
    rendezvous: Rendezvous | None = None
    """`tell`: where it finds the target."""


class DraftElsewhere:
    """The draft in the care of the last rank. Satisfies `DraftSource`; may be asked from several threads."""

    def __init__(self, link: ZeroMQTransport, events: str | None) -> None:
        """`link`: to the last rank. `events`: as of `make_recorder`."""
        self._link = link
        self._lock = threading.Lock()
        self._told = 0
        self._ended = (0, "")
        """The draft that has ended last, and how, as the last rank says."""
        link.send_frame(msgspec.msgpack.encode(events))

    def newest(self) -> int:
        """See `DraftSource`."""
        return max(1, self._told + (self.ending(0.0) is not None))

    def ending(self, timeout: float, /) -> str | None:
        """See `DraftSource`."""
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                while (frame := self._link.receive_frame(0.0)) is not None:
                    self._ended = _decoded(frame, tuple[int, str])
            incarnation, text = self._ended
            if 0 < incarnation == self._told:
                return text
            if time.monotonic() >= deadline:
                return None
            time.sleep(LOOK_SECONDS)

    def tell(self, incarnation: int, rendezvous: Rendezvous | None) -> None:
        """See `DraftSource`."""
        if rendezvous is not None:
            self._told = incarnation
            self._order(Order("tell", incarnation, rendezvous))

    def met(self) -> None:
        """See `DraftSource`."""
        self._order(Order("met"))

    def dismiss(self) -> None:
        """See `DraftSource`."""
        self._order(Order("dismiss"))

    def _order(self, order: Order) -> None:
        with self._lock:
            self._link.send_frame(msgspec.msgpack.encode(order))


def _decoded(frame: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(frame, type=kind)
    except msgspec.MsgspecError as error:
        raise PeerProtocolError(f"another rank does not say what it should: {error}") from None


def _run_target(command: str, config: RunConfig, own: Place, meeting: Meeting, cores: Sequence[int]) -> int:
    number = config.target_tensor_parallel_size
    with ExitStack() as stack:
        if not own.is_apart:
            stack.callback(shutil.rmtree, meeting.address, ignore_errors=True)
        link = numbered_link(config.transport, meeting.address, number, Role.DRAFT, listens=True)
        stack.enter_context(closing(link))
        others = None if number == 1 else meeting
        if number > 1 and own.size == 2:
            others = Followers(config.engine_for(command), cores).meeting
            stack.callback(others.stop)

        def make_engine(config: RunConfig, events: str | None, console: Console) -> Engine:
            from amusd import engine
            from amusd.runtime.startup import make_recorder

            drafts, recorder = DraftElsewhere(link, events), make_recorder(Role.TARGET, events)
            wanted = config.engine_for(command)
            made = engine.Engine.connect(wanted, drafts, recorder, report=console.note, meeting=others)
            write_workers(Path(config.run_dir or "."), target=[os.getpid()], draft=None)
            return made

        with closing(Jobs(command, make_engine)) as jobs:
            return jobs.run(config)


def _look_after_draft(config: EngineConfig, meeting: Meeting) -> None:
    """Do what rank 0 orders, until it has ended; that says why."""
    number = config.target_tensor_parallel_size
    with ExitStack() as stack, suppress(PeerLostError):
        link = numbered_link(config.transport, meeting.address, number, Role.DRAFT, listens=False)
        stack.callback(link.close)
        told = link.receive_frame(config.startup_timeout_seconds)
        if told is None:
            return
        events = _decoded(told, str | None)
        if events is not None and not Path(events).is_dir():  # another machine may not have it
            events = None
        process = DraftProcess(config, events=events, tell_loss=tell)
        stack.callback(process.stop)
        process.prepare()
        incarnation = ended = 0
        while True:
            while (frame := link.receive_frame(0.0)) is not None:
                order = _decoded(frame, Order)
                if order.kind == "tell":
                    incarnation = order.incarnation
                    process.tell(incarnation, order.rendezvous)
                else:
                    (process.met if order.kind == "met" else process.dismiss)()
            if ended < incarnation and (text := process.ending(0.0)) is not None:
                ended = incarnation
                link.send_frame(msgspec.msgpack.encode((ended, text)))
            time.sleep(LOOK_SECONDS)
