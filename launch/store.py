"""The store in which two ranks meet before they have a link: a few JSON values in torchrun's, or the target's own.

Whoever reaches the store's port can read and write there. So no value is a secret, none is a prompt, and each is sealed
(HMAC-SHA256 over its name and text) with a secret that the workers have from files: a forged one is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amusd.errors import ConfigError, PeerLostError, first_line

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in its __all__

CONNECT_SECONDS = 60.0
SILENCE_SECONDS = 10.0
"""A store that has not answered for so long is gone: a cable was cut, or its machine has no power."""
_LAST_TRY_SECONDS = 1.0
_SEAL_LENGTH = 2 * hashlib.sha256().digest_size
LOOK_SECONDS = 0.02
"""How often it is looked whether one of several values is there."""
_MAX_PORT = 65535
_FEWEST = 2
_PERMISSIONS = ("transport.keys=", "transport.insecure=true")


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place of this process as torchrun or `two_nodes.sh` set it."""

    rank: int
    """0 is the target, the last one the draft; those between look after further ranks of the target."""
    size: int = 2
    """Number of processes."""
    apart: bool
    """They are on two machines, one on each."""
    address: str
    port: int
    is_by_itself: bool
    """No torchrun has started this process, nor serves the store: rank 0 does."""
    namespace: str
    """Keeps the values of another run or attempt apart."""

    @property
    def is_away(self) -> bool:
        """Whether there is another machine, and the target is on that one."""
        return self.apart and self.rank != 0

    @property
    def endpoint(self) -> str:
        """The address of the store, for people."""
        return f"{self.address}:{self.port}"

    def check_address(self, overrides: Sequence[str]) -> None:
        """Raise `ConfigError` when the run would reach beyond this machine and nobody has said that it may."""
        try:
            is_local = ipaddress.ip_address(self.address.strip("[]")).is_loopback
        except ValueError:
            is_local = self.address == "localhost"
        if (
            (self.is_by_itself or self.apart)
            and not is_local
            and not any(text.startswith(_PERMISSIONS) for text in overrides)
        ):
            raise ConfigError(
                f"{self.endpoint}: not on this machine, and neither transport.keys=FOLDER (`amusd keys FOLDER` makes "
                "it) nor, on a network you trust, transport.insecure=true is given"
            )


def place_from_environment() -> Place:
    """Read torchrun's variables. Raises `ConfigError` when it did not start this process and others."""
    environment = os.environ
    if "RANK" not in environment or "MASTER_ADDR" not in environment:
        raise ConfigError(
            'launch/run.py: start it with torchrun --standalone --nproc-per-node=2 launch/run.py prompt="...", '
            "or use the amusd command"
        )
    if int(environment["WORLD_SIZE"]) < _FEWEST:
        raise ConfigError(
            f"WORLD_SIZE={environment['WORLD_SIZE']}: at least 2 processes are needed, for the target and the draft "
            "(--nproc-per-node=2, or --nnodes=2 --nproc-per-node=1); the first starts the target's other "
            "ranks itself, as target_tensor_parallel_size says"
        )
    apart = environment.get("LOCAL_WORLD_SIZE", "1") != environment["WORLD_SIZE"]
    if apart and int(environment["WORLD_SIZE"]) > _FEWEST:
        raise ConfigError(
            f"WORLD_SIZE={environment['WORLD_SIZE']} on several machines: a target has one machine, and a draft that "
            "or another one; start --nnodes=2 --nproc-per-node=1, whose first process starts all ranks of the target, "
            "or all processes on one machine"
        )
    port = environment["MASTER_PORT"]
    if not port.isdecimal() or int(port) > _MAX_PORT:
        raise ConfigError(f"{environment['MASTER_ADDR']}:{port}: a port is a number up to {_MAX_PORT}")
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    return Place(
        rank=int(environment["RANK"]),
        size=int(environment["WORLD_SIZE"]),
        apart=apart,
        address=environment["MASTER_ADDR"],
        port=int(port),
        is_by_itself=environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        namespace=f"amusd/{run}/{environment.get('TORCHELASTIC_RESTART_COUNT', 0)}",
    )


class Store:
    """JSON values under names. Every wait has a deadline; a lost store raises `PeerLostError`."""

    def __init__(self, place: Place, secret: bytes = b"") -> None:
        """`secret`: what values are sealed with; without one a seal keeps nobody out.

        Raises `ConfigError` where our own store cannot be served or found, `PeerLostError` where torchrun's cannot.
        """
        self._namespace = place.namespace
        self._secret = secret
        serves = place.is_by_itself and place.rank == 0
        try:
            with _loss_is_reported():
                self._store = (serve_store if serves else join_store)(place.address.strip("[]"), place.port)
        except (OSError, PeerLostError) as error:
            if not place.is_by_itself:
                raise
            does = "cannot listen there" if serves else "no target found there"
            raise ConfigError(f"{place.endpoint}: {does} ({str(error).splitlines()[0]})") from error

    def put(self, name: str, value: Any) -> None:
        """Publish a value; a later one replaces it."""
        text = json.dumps(value)
        with _loss_is_reported():
            self._store.set(f"{self._namespace}/{name}", self._seal(name, text) + text)

    def get(self, name: str, timeout: float) -> Any:
        """The value, once it is there.

        Raises `PeerLostError` after `timeout` seconds, `ConfigError` when it was not sealed with this secret.
        """
        key = f"{self._namespace}/{name}"
        with _loss_is_reported():
            self._store.wait([key], timedelta(seconds=timeout))
            sealed = self._store.get(key)
        seal, text = sealed[:_SEAL_LENGTH], sealed[_SEAL_LENGTH:]
        if not hmac.compare_digest(seal, self._seal(name, text.decode("utf-8", "replace")).encode()):
            raise ConfigError(
                f"the value {name!r} in the store was not written with this side's secret: another store.key_secret in "
                "transport.keys, or somebody else wrote it"
            )
        return json.loads(text)

    def await_any(self, names: Sequence[str], timeout: float | None) -> str:
        """The first of these names that has a value, once one has; None: as long as the store is there.

        Raises `PeerLostError` after `timeout` seconds.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (found := next((name for name in names if self.has(name)), None)) is None:
            if time.monotonic() >= deadline:
                raise PeerLostError(f"the other worker said nothing for {timeout:g} seconds ({', '.join(names)})")
            time.sleep(LOOK_SECONDS)
        return found

    def has(self, name: str) -> bool:
        """Whether the value is there now."""
        with _loss_is_reported():
            return bool(self._store.check([f"{self._namespace}/{name}"]))

    def _seal(self, name: str, text: str) -> str:
        return hmac.new(self._secret, f"{self._namespace}/{name}\0{text}".encode(), hashlib.sha256).hexdigest()


def serve_store(address: str, port: int) -> TCPStore:
    """A store that listens at this address alone; 0 picks a port. Raises OSError where it cannot.

    Left to itself, torch listens on every interface, whatever address it is given.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, port), family=family) as listener:
        picked = int(listener.getsockname()[1])
        return join_store(address, picked, listener=listener.detach())


def join_store(address: str, port: int, *, listener: int | None = None) -> TCPStore:
    """The store at an address, within `CONNECT_SECONDS`; with a `listener` (a descriptor), served by this process."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing in its __all__

    deadline = time.monotonic() + CONNECT_SECONDS
    if listener is None:
        _await_port(address, port, deadline)
    store = TCPStore(
        address,
        port,
        is_master=listener is not None,
        master_listen_fd=listener,
        timeout=timedelta(seconds=max(_LAST_TRY_SECONDS, deadline - time.monotonic())),
        wait_for_workers=False,
    )
    _end_silent_connections(port)
    return store


def _end_silent_connections(port: int) -> None:
    """Have Linux end this process's connections to a port `SILENCE_SECONDS` after their other end was cut off.

    torch itself asks the store without a deadline, and does not tell which connection is the store's.
    """
    folder = Path("/proc/self/fd")
    for number in [int(entry.name) for entry in folder.iterdir() if entry.is_socket()] if folder.is_dir() else ():
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(SILENCE_SECONDS / 5))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(SILENCE_SECONDS / 5))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * SILENCE_SECONDS))


def _await_port(address: str, port: int, deadline: float) -> None:
    """Wait until the store listens, or for the deadline. torch itself waits where no signal is handled."""
    while (left := deadline - time.monotonic()) > 0:
        with suppress(OSError), socket.create_connection((address, port), timeout=left):
            return
        time.sleep(LOOK_SECONDS)


@contextmanager
def _loss_is_reported() -> Iterator[None]:
    from torch.distributed import DistError

    try:
        yield
    except DistError as error:
        reason = first_line(error)
        raise PeerLostError(f"the other worker cannot be reached through the store: {reason}") from None
