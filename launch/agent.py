"""torchrun, with a store that listens at one address: `agent.py TORCHRUN_ARGUMENTS`.

torchrun's own stores listen on every interface, whatever address they are given, and its rendezvous for one machine
(`--standalone`) unpickles what it finds there. This one listens where `--rdzv-endpoint=HOST:PORT` says, which is
loopback unless workers run on two machines, and holds texts that nobody executes (`store.py`).
"""

from __future__ import annotations

import ipaddress
import logging
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file: become a module of the folder it lies in (PEP 366)
    _folder = Path(__file__).resolve().parent
    sys.path[0] = str(_folder.parent)
    __package__ = _folder.name
    __import__(__package__)

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # missing in its __all__
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main as torchrun

from amusd.errors import ConfigError

from .scratch import read_outcome, scratch_folder
from .store import CONNECT_SECONDS, join_store, serve_store
from .terminal import tell, waiting_for

BACKEND = "amusd"
_ENDPOINT = "--rdzv-endpoint="
_OUTCOME = "--outcome-file="
END_SECONDS = 5.0
"""How long the agents wait for each other when the run is over; five minutes, left to torchrun."""
MAX_PORT = 65535
_LOOK_SECONDS = 0.05
_PERMISSIONS = ("transport.keys=", "transport.insecure=true")


class _AgentStore(PrefixStore):
    """What torchrun sees of the store. A machine that is gone at the end is not waited for long, nor told of.

    An agent that has this store has seen all others there (`OneAddress`), so their end is all that is left to wait for,
    whatever torchrun calls it; values it reads with `get`, whose deadline stays as it is.
    """

    def wait(self, keys: list[str], *_timeout: timedelta) -> None:
        with suppress(DistError):
            super().wait(keys, timedelta(seconds=END_SECONDS))


class OneAddress(RendezvousHandler):
    """Agents that know their places, and a store that the one of rank 0 serves at one address."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        host, _, port = parameters.endpoint.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._rank = int(parameters.get("rank", 0))
        self._num_nodes = parameters.max_nodes
        self._run_id = parameters.run_id
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """The workers use it too."""
        return True

    def get_backend(self) -> str:
        """What `--rdzv-backend` calls it."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """The store, once all agents have found it. Raises `ConfigError` where that takes too long."""
        if self._store is None:
            open_store = serve_store if self._rank == 0 else join_store
            try:
                with self._waiting(1, "the target's machine (NODE_RANK=0)"):
                    self._store = open_store(self._host, self._port)
            except (DistError, OSError) as error:
                does = "cannot listen there" if self._rank == 0 else "no target found there"
                raise ConfigError(f"{self._host}:{self._port}: {does} ({str(error).splitlines()[0]})") from error
        store = _AgentStore(self._run_id, self._store)
        with self._waiting(0, "the draft's machine (NODE_RANK=1)"):
            self._await_others(store)
        return RendezvousInfo(store, self._rank, self._num_nodes, RendezvousStoreInfo(self._host, self._store.port))

    def _waiting(self, rank: int, whom: str) -> AbstractContextManager[None]:
        """Of two machines the one of this rank waits for the other, and says so; agents of one machine do not wait."""
        if self._num_nodes == 1 or self._rank != rank:
            return nullcontext()
        return waiting_for(f"{whom} at {self._host}:{self._port}", CONNECT_SECONDS)

    def _await_others(self, store: Store) -> None:
        store.set(f"here/{self._rank}", "")
        deadline = time.monotonic() + CONNECT_SECONDS
        while not store.check([f"here/{rank}" for rank in range(self._num_nodes)]):
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"{self._host}:{self._port}: nobody else came within {CONNECT_SECONDS:g} seconds; the same line is "
                    "to run on the draft's machine, with NODE_RANK=1"
                )
            time.sleep(_LOOK_SECONDS)

    def is_closed(self) -> bool:
        """Never: it is used once."""
        return False

    def set_closed(self) -> None:
        """Nobody asks."""

    def num_nodes_waiting(self) -> int:
        """None: how many there are is settled."""
        return 0

    def get_run_id(self) -> str:
        """As torchrun was told."""
        return self._run_id

    def shutdown(self) -> bool:
        """The store goes with the process."""
        return True


def main(arguments: Sequence[str]) -> int:
    """Run torchrun; return the exit code of this machine's first rank, unless `amusd` is told it.

    A rank that is killed is one line, not torchrun's report and log.
    """
    logging.disable(logging.ERROR)
    try:
        _check_endpoint(arguments)
        return _run(arguments)
    except ConfigError as error:
        tell(str(error))
        return 2
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with {failure.exitcode}"
        if failure.exitcode == -signal.SIGALRM:
            how = "was asked to end, and took too long"
        tell(f"local rank {failure.local_rank} (pid {failure.pid}) {how}")
        return 1
    except SignalException as error:  # the ranks have ended by now, and saved what they had
        return 128 + error.sigval


def _run(arguments: Sequence[str]) -> int:
    rendezvous_handler_registry.register(BACKEND, OneAddress)
    if any(text.startswith(_OUTCOME) for text in arguments):
        torchrun(list(arguments))
        return 0
    with scratch_folder() as scratch:
        path = scratch / "outcome"
        entry = next(place for place, text in enumerate(arguments) if text.endswith(".py")) + 1
        torchrun([*arguments[:entry], f"{_OUTCOME}{path}", *arguments[entry:]])
        return read_outcome(path).exit_code or 0


def _check_endpoint(arguments: Sequence[str]) -> None:
    """Raises `ConfigError` when the store would listen beyond this machine and nobody has said that it may."""
    endpoint = next((text.removeprefix(_ENDPOINT) for text in arguments if text.startswith(_ENDPOINT)), "")
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    if not port.isdecimal() or int(port) > MAX_PORT:
        raise ConfigError(f"{endpoint}: a port is a number up to {MAX_PORT}")
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    if not is_local and not any(text.startswith(_PERMISSIONS) for text in arguments):
        raise ConfigError(
            f"{endpoint}: not on this machine, and neither transport.keys=FOLDER (`amusd keys FOLDER` makes it) nor, "
            "on a network you trust, transport.insecure=true is given"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
