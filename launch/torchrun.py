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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from amusd.config import RunConfig
from amusd.console import Console, tell
from amusd.errors import ConfigError, PeerLostError, PeerProtocolError, first_line
from amusd.models.meeting import LOOPBACK, Meeting
from amusd.runtime.cores import allowed_cores, cores_for, pin_to
from amusd.runtime.devices import check_devices, count_gpus, devices_of, settle_devices
from amusd.runtime.draft_process import DraftProcess
from amusd.runtime.followers import Followers
from amusd.runtime.placement import place
from amusd.transport.addresses import address_towards, parse_endpoint
from amusd.transport.base import Rendezvous
from amusd.transport.factory import numbered_link
from amusd.types import Role

from .devices import NCCL_SETTINGS, set_threads
from .jobs import Jobs
from .run_directory import write_workers

if TYPE_CHECKING:
    from amusd.engine import Engine

T = TypeVar("T")

COMMANDS = ("generate", "compare", "serve")
STORE_SECONDS = 60.0
"""Longest wait for the store, and for what another rank puts there."""
LOOK_SECONDS = 0.02
"""How often the last rank looks after the draft's process."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of this process among those of torchrun."""

    rank: int
    size: int
    local_rank: int = 0
    local_size: int
    """Processes on this machine."""
    address: str
    port: int
    serves_store: bool = False
    """No agent of torchrun serves the store, so rank 0 has to."""
    run: str
    """Keeps what is in the store apart from other runs and attempts."""

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
    found = os.environ
    if "RANK" not in found or "MASTER_ADDR" not in found:
        raise ConfigError(
            'launch/run.py: start it with torchrun --standalone --nproc-per-node=2 launch/run.py prompt="...", '
            "or use the amusd command"
        )
    rank = int(found["RANK"])
    return Place(
        rank=rank,
        size=int(found["WORLD_SIZE"]),
        local_rank=int(found["LOCAL_RANK"]),
        local_size=int(found["LOCAL_WORLD_SIZE"]),
        address=found["MASTER_ADDR"],
        port=int(found["MASTER_PORT"]),
        serves_store=rank == 0 and found.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        run=f"{found.get('TORCHELASTIC_RUN_ID', '')}/{found.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )


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


class Store:
    """Texts under names, in torchrun's store. Raises `PeerLostError` when it cannot be reached."""

    def __init__(self, own: Place) -> None:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # missing in its __all__

        with _loss_is_told():
            served = TCPStore(
                own.address,
                own.port,
                is_master=own.serves_store,
                timeout=timedelta(seconds=STORE_SECONDS),
                wait_for_workers=False,
            )
        self.torch: Any = PrefixStore(f"amusd/{own.run}", served)

    def put(self, name: str, text: str) -> None:
        """Publish a text."""
        with _loss_is_told():
            self.torch.set(name, text)

    def get(self, name: str) -> str:
        """The text, once it is there."""
        deadline = time.monotonic() + STORE_SECONDS
        with _loss_is_told():
            while not self.torch.check([name]):  # `wait` would hold signals up
                if time.monotonic() >= deadline:
                    raise PeerLostError(f"the other ranks said nothing for {STORE_SECONDS:g} seconds ({name})")
                time.sleep(LOOK_SECONDS)
            return bytes(self.torch.get(name)).decode()


@contextmanager
def _loss_is_told() -> Iterator[None]:
    from torch.distributed import DistError

    try:
        yield
    except DistError as error:
        raise PeerLostError(f"torchrun's store cannot be reached: {first_line(error)}") from None


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
    set_threads(config.hardware.num_threads)
    os.environ.update(NCCL_SETTINGS)
    store = Store(own)
    config = _on_devices(config, own, store, cores)
    engine = config.engine_for(command)
    if own.rank == 0:
        return _run_target(command, config, own, store, cores)
    meeting = _meeting(config, own, store)
    if own.is_last:
        _look_after_draft(config, command, meeting.address)
    else:
        from amusd.runtime.startup import run_follower

        run_follower(engine, own.rank, meeting)
    return 0


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


def _on_devices(config: RunConfig, own: Place, store: Store, cores: list[int]) -> RunConfig:
    """The configuration with the device of each rank; a rank of the target on a CPU keeps to cores of its own."""
    if own.is_apart:
        devices = own_devices(config, own)
        check_devices(devices)
        store.put(f"devices/{own.rank}", " ".join(devices))
        everywhere = [device for rank in range(own.size) for device in store.get(f"devices/{rank}").split()]
        config = dataclasses.replace(config, hardware=dataclasses.replace(config.hardware, devices=tuple(everywhere)))
    (rank, *_), here = ranks_of(own, config.target_tensor_parallel_size)
    if not own.is_last and config.hardware.devices[rank] == "cpu":
        pin_to(cores_for(Role.TARGET, cores, config.hardware, rank=rank - here.start, num_target_ranks=len(here)))
    return config


def _meeting(config: RunConfig, own: Place, store: Store) -> Meeting:
    """Where the ranks meet. Raises `ConfigError` for a folder that others may enter."""
    address = config.transport.address
    if own.is_apart and address is not None:
        endpoint = parse_endpoint(address, beyond=True, to_bind=False)
        host = address_towards(endpoint.host, endpoint.port)
        listening = f"tcp://{host}:{endpoint.port}" if own.rank == 0 else address  # libzmq binds to no names
        return Meeting(address=listening, host=host, store=store.torch)
    folder = store.get("folder")
    status = Path(folder).lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{folder}: torchrun's store names this folder, which is not private to this user")
    return Meeting(address=folder, host=LOOPBACK)


# The target's rank 0, and its draft in the care of the last rank


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the last rank is to do, as rank 0 says."""

    kind: Literal["prepare", "tell", "met", "dismiss"]
    events: str | None = None
    """`prepare`: the folder where the draft keeps its events."""
    incarnation: int = 0
    """`tell`: of the draft that is to start."""
    rendezvous: Rendezvous | None = None
    """`tell`: where it finds the target."""


@dataclass(frozen=True, kw_only=True)
class State:
    """How the draft's process is doing, as the last rank says when it changes."""

    incarnation: int
    """Of the draft that was told last."""
    newest: int = 0
    failure: str | None = None
    """Why no other one can come."""
    ending: str | None = None
    pid: int | None = None


class DraftElsewhere:
    """The draft in the care of the last rank. Satisfies `DraftSource`; may be asked from several threads."""

    def __init__(self, link: Any, events: str | None) -> None:
        """`link`: to the last rank. `events`: as of `make_recorder`."""
        self._link = link
        self._lock = threading.Lock()
        self._told = 0
        self._state = State(incarnation=0)
        self._order(Order(kind="prepare", events=events))

    @property
    def pid(self) -> int | None:
        """Process id of the newest draft, as far as it is known."""
        return self._state.pid

    def newest(self) -> int:
        """See `DraftSource`."""
        self._look()
        if self._state.failure is not None:
            raise PeerLostError(self._state.failure)
        return self._state.newest

    def ending(self, timeout: float, /) -> str | None:
        """See `DraftSource`."""
        deadline = time.monotonic() + timeout
        while True:
            self._look()
            if self._state.incarnation == self._told and self._state.ending is not None:
                return self._state.ending
            if time.monotonic() >= deadline:
                return None
            time.sleep(LOOK_SECONDS)

    def tell(self, incarnation: int, rendezvous: Rendezvous | None) -> None:
        """See `DraftSource`."""
        if rendezvous is not None:
            self._told = incarnation
            self._order(Order(kind="tell", incarnation=incarnation, rendezvous=rendezvous))

    def met(self) -> None:
        """See `DraftSource`."""
        self._order(Order(kind="met"))

    def dismiss(self) -> None:
        """See `DraftSource`."""
        self._order(Order(kind="dismiss"))

    def _order(self, order: Order) -> None:
        with self._lock:
            self._link.send_frame(msgspec.msgpack.encode(order))

    def _look(self) -> None:
        with self._lock:
            while (frame := self._link.receive_frame(0.0)) is not None:
                self._state = _decoded(frame, State)


def _decoded(frame: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(frame, type=kind)
    except msgspec.MsgspecError as error:
        raise PeerProtocolError(f"another rank says what is no {kind.__name__}: {error}") from None


def _run_target(command: str, config: RunConfig, own: Place, store: Store, cores: Sequence[int]) -> int:
    with ExitStack() as stack:
        if not own.is_apart:
            folder = tempfile.mkdtemp(prefix="amusd-ranks-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            store.put("folder", folder)
        meeting = _meeting(config, own, store)
        if own.is_apart:
            link_config = dataclasses.replace(config.transport, address=meeting.address)
            config = dataclasses.replace(config, transport=link_config)
        number = config.target_tensor_parallel_size
        link = numbered_link(config.transport, meeting.address, number, Role.DRAFT, listens=True)
        stack.enter_context(closing(link))
        others: Meeting | None = meeting
        engine = config.engine_for(command)
        if engine.target_tensor_parallel_size == 1:
            others = None
        elif own.size == 2:
            others = Followers(engine, cores).meeting
            stack.callback(others.stop)

        def make_engine(config: RunConfig, events: str | None, console: Console) -> Engine:
            from amusd import engine as engines
            from amusd.runtime.startup import make_recorder

            drafts = DraftElsewhere(link, events)
            recorder = make_recorder(Role.TARGET, events)
            made = engines.Engine.connect(engine, drafts, recorder, report=console.note, meeting=others)
            write_workers(Path(config.run_dir or "."), target=[os.getpid()], draft=drafts.pid)
            return made

        with closing(Jobs(command, make_engine)) as jobs:
            return jobs.run(config)


def _look_after_draft(config: RunConfig, command: str, address: str) -> None:
    """Do what rank 0 orders, until it has ended."""
    number = config.target_tensor_parallel_size
    with closing(numbered_link(config.transport, address, number, Role.DRAFT, listens=False)) as link:
        process: DraftProcess | None = None
        state = State(incarnation=0)
        try:
            while True:
                while (frame := link.receive_frame(0.0)) is not None:
                    order = _decoded(frame, Order)
                    if order.kind == "prepare":
                        there = order.events if order.events and Path(order.events).is_dir() else None
                        process = DraftProcess(config.engine_for(command), events=there, tell_loss=tell)
                        process.prepare()
                    elif process is not None:
                        _do(order, process)
                        state = dataclasses.replace(state, incarnation=order.incarnation or state.incarnation)
                found = state if process is None else _state_of(process, state.incarnation)
                if found != state:
                    link.send_frame(msgspec.msgpack.encode(found))
                    state = found
                time.sleep(LOOK_SECONDS)
        except PeerLostError:
            pass  # the target has ended, and its rank 0 says why
        finally:
            if process is not None:
                process.stop()


def _do(order: Order, process: DraftProcess) -> None:
    if order.kind == "tell":
        process.tell(order.incarnation, order.rendezvous)
    elif order.kind == "met":
        process.met()
    else:
        process.dismiss()


def _state_of(process: DraftProcess, incarnation: int) -> State:
    ending = process.ending(0.0) if incarnation else None
    try:
        return State(incarnation=incarnation, newest=process.newest(), ending=ending, pid=process.pid)
    except PeerLostError as error:
        return State(incarnation=incarnation, failure=str(error), ending=ending, pid=process.pid)
