"""torchrun, with a store that listens at one address: `agent.py TORCHRUN_ARGUMENTS`.

torchrun's own stores listen on every interface, whatever address they are given, and its rendezvous for one machine
(`--standalone`) unpickles what it finds there. This one listens where `--rdzv-endpoint=HOST:PORT` says, which is
loopback unless workers run on two machines, and holds texts that nobody executes (`store.py`).
"""

from __future__ import annotations

import ipaddress
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file: become a module of the folder it lies in (PEP 366)
    _folder = Path(__file__).resolve().parent
    sys.path[0] = str(_folder.parent)
    __package__ = _folder.name
    __import__(__package__)

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # missing in its __all__
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main as torchrun

from amusd.errors import ConfigError

from .outcome import read_outcome
from .store import join_store, serve_store
from .terminal import tell

BACKEND = "amusd"
_ENDPOINT = "--rdzv-endpoint="
_OUTCOME = "--outcome-file="
_PERMISSIONS = ("transport.keys=", "transport.insecure=true")


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
        """The store; where another machine serves it, this waits for it, with a deadline."""
        if self._store is None:
            open_store = serve_store if self._rank == 0 else join_store
            self._store = open_store(self._host, self._port)
        store: Store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, self._rank, self._num_nodes, RendezvousStoreInfo(self._host, self._store.port))

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
    """Run torchrun; return the target's exit code where the target is on this machine and `amusd` is not told it."""
    try:
        _check_endpoint(arguments)
    except ConfigError as error:
        tell(str(error))
        return 2
    rendezvous_handler_registry.register(BACKEND, OneAddress)
    if any(text.startswith(_OUTCOME) for text in arguments):
        torchrun(list(arguments))
        return 0
    with tempfile.TemporaryDirectory(prefix="amusd-") as scratch:
        path = Path(scratch) / "outcome"
        entry = next(place for place, text in enumerate(arguments) if text.endswith(".py")) + 1
        torchrun([*arguments[:entry], f"{_OUTCOME}{path}", *arguments[entry:]])
        return read_outcome(path).exit_code or 0


def _check_endpoint(arguments: Sequence[str]) -> None:
    """Raises `ConfigError` when the store would listen beyond this machine and nobody has said that it may."""
    endpoint = next((text.removeprefix(_ENDPOINT) for text in arguments if text.startswith(_ENDPOINT)), "")
    host = endpoint.rpartition(":")[0].strip("[]")
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
