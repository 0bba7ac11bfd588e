"""The process groups of a `torch.distributed` link, without a default group, a world or the environment.

The processes meet at a TCP store that the target serves on the one address it listens at; gloo listens only there, too.
Each direction has a group, so that neither waits for the other.
"""

# ruff: noqa: SLF001 - the options of a process group have no public names
from __future__ import annotations

import socket
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import distributed

from amusd.errors import ConfigError
from amusd.transport.addresses import Endpoint, address_towards
from amusd.transport.lanes import Bodies, Lane

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Backend = Literal["gloo", "nccl"]

TARGET_RANK = 0
DRAFT_RANK = 1

FORM_SECONDS = 30.0
STORE_SECONDS = 5.0
DEVICE_BODY_SECONDS = 10.0

_c10d: Any = distributed  # whose own type stubs know little of what is used here
_DIRECTIONS = ("to_draft", "to_target")


def _store(endpoint: Endpoint, **options: Any) -> Any:
    timeout = timedelta(seconds=STORE_SECONDS)
    return _c10d.TCPStore(endpoint.host, endpoint.port, timeout=timeout, wait_for_workers=False, **options)


class Meeting:
    """One end's connection to the store."""

    def __init__(self, store: Any, endpoint: Endpoint, rank: int, nonce: int) -> None:
        self.endpoint = endpoint
        self._store = _c10d.PrefixStore(f"amusd/{nonce:016x}", store)
        self._rank = rank
        self._peer = TARGET_RANK + DRAFT_RANK - rank
        self._store.set(f"arrived/{rank}", "1")

    @classmethod
    def host(cls, endpoint: Endpoint, nonce: int) -> Meeting:
        """Serve the store, without waiting. Raises OSError when it cannot listen."""
        family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
        listening = socket.create_server((endpoint.host, endpoint.port), family=family)
        endpoint = replace(endpoint, port=listening.getsockname()[1])
        # the store would listen on all interfaces; it takes over a socket that listens on one
        return cls(_store(endpoint, is_master=True, master_listen_fd=listening.detach()), endpoint, TARGET_RANK, nonce)

    @classmethod
    def join(cls, endpoint: Endpoint, nonce: int) -> Meeting:
        """Connect to the store. Raises OSError when it is not served, RuntimeError when it does not answer."""
        with closing(socket.create_connection((endpoint.host, endpoint.port), STORE_SECONDS)):
            pass  # the store itself would try again and again, and say so on standard error
        return cls(_store(endpoint, is_master=False), endpoint, DRAFT_RANK, nonce)

    @property
    def is_complete(self) -> bool:
        """Whether both ends are there. Raises RuntimeError when the store is lost."""
        return bool(self._store.check([f"arrived/{self._peer}"]))

    def form_lanes(self, patience: timedelta, device: str | None) -> tuple[Lane, Lane]:
        """Form the lanes to the peer and from it. Raises RuntimeError.

        `device`: sends bodies by NCCL; None: by gloo.
        """
        host = (
            self.endpoint.host
            if self._rank == TARGET_RANK or self.endpoint.is_local
            else address_towards(self.endpoint.host, self.endpoint.port)
        )
        lanes = []
        for direction in _DIRECTIONS:
            blocks = _gloo_group(_c10d.PrefixStore(f"{direction}/blocks", self._store), self._rank, host)
            bodies = Bodies(blocks, patience)
            if device is not None:
                bodies = device_bodies(_c10d.PrefixStore(f"{direction}/bodies", self._store), self._rank, device)
                _warm_up(bodies, self._peer, sends=(direction == "to_draft") == (self._rank == TARGET_RANK))
            lanes.append(Lane(blocks, bodies, peer=self._peer, patience=patience))
        to_draft, to_target = lanes
        return (to_draft, to_target) if self._rank == TARGET_RANK else (to_target, to_draft)


def device_bodies(store: Any, rank: int, device: str) -> Bodies:
    """Bodies from device to device; their kernels use one block, on a stream of their own."""
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=FORM_SECONDS)
    options.config.max_ctas = 1
    with torch.cuda.device(device):
        group = _c10d.ProcessGroupNCCL(store, rank, 2, options)
        stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
    patience = timedelta(seconds=DEVICE_BODY_SECONDS)
    return Bodies(group, patience, device=device, on_stream=lambda: torch.cuda.stream(stream))


def check_backend(backend: Backend, devices: tuple[str, str], *, same_machine: bool) -> None:
    """Raise ConfigError if this torch cannot form such groups between the target's and the draft's device."""
    if not distributed.is_available() or not distributed.is_gloo_available():
        raise ConfigError(f"transport={backend}: the installed torch has no gloo; use transport=zeromq")
    if backend == "gloo":
        return
    if not distributed.is_nccl_available():
        raise ConfigError("transport=nccl: the installed torch has no NCCL; use transport=auto")
    places = [torch.device(device) for device in devices]
    is_shared = same_machine and (torch.cuda.device_count() < len(places) or len({at.index or 0 for at in places}) == 1)
    if is_shared or any(place.type != "cuda" for place in places):
        raise ConfigError(
            f"transport=nccl: needs a CUDA device for each worker; the target is on {devices[0]}, the draft on "
            f"{devices[1]}, of {torch.cuda.device_count()}; use transport=auto"
        )


def _gloo_group(store: Any, rank: int, host: str) -> ProcessGroup:
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=FORM_SECONDS)
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 1
    group: ProcessGroup = _c10d.ProcessGroupGloo(store, rank, 2, options)
    return group


def _warm_up(bodies: Bodies, peer: int, *, sends: bool) -> None:
    if sends:
        bodies.send(b"\0", peer)
    else:
        bodies.receive(1, peer)
