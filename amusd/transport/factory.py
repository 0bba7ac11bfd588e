"""Chooses and makes the link between the workers: the draft listens, the target connects.

Without an address the workers are two processes of this machine. Without ZeroMQ the other links work.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from amusd.config import TransportConfig
from amusd.errors import ConfigError
from amusd.files import make_socket_folder
from amusd.transport.addresses import check_address
from amusd.transport.base import Transport
from amusd.transport.shared_memory import SHARED_MEMORY, SharedMemoryTransport
from amusd.types import Role

if TYPE_CHECKING:
    from amusd.transport.curve import Keys
    from amusd.transport.zeromq import ZeroMQTransport

GPU_EACH = ("cuda:0", "cuda:1")
_PROCESS_GROUPS = ("gloo", "nccl")

ON_ONE_MACHINE: Mapping[str, TransportConfig] = {
    "shared_memory": TransportConfig(kind="shared_memory"),
    "zeromq": TransportConfig(kind="zeromq"),
    "zeromq_tcp": TransportConfig(kind="zeromq", address="tcp://127.0.0.1:0"),
    "gloo": TransportConfig(kind="gloo"),
    "nccl": TransportConfig(kind="nccl"),
}
"""Every link between two processes here; `zeromq` is over a socket file, `zeromq_tcp` over TCP."""


@contextmanager
def link_address(config: TransportConfig, devices: tuple[str, str] = GPU_EACH) -> Iterator[str]:
    """Yield the link's address: `config`'s, or a private one, removed afterwards. Raises ConfigError."""
    if config.address is not None:
        yield config.address
        return
    folder = make_socket_folder()
    try:
        yield address_in(folder, config, devices)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def address_in(folder: str, config: TransportConfig, devices: tuple[str, str] = GPU_EACH) -> str:
    """The address of the link of two processes that share a private folder. Raises ConfigError."""
    if config.kind == "gloo" or config.kind == "nccl":
        from amusd.transport.torch_distributed import check_backend

        check_backend(config.kind, devices)
        return f"{config.kind}://{folder}"
    is_possible = hasattr(os, "memfd_create") and hasattr(socket, "AF_UNIX")
    if config.kind == "shared_memory" and not is_possible:
        raise ConfigError("transport=shared_memory: not on this system, use transport=zeromq")
    return f"{'ipc://' if config.kind == 'zeromq' or not is_possible else SHARED_MEMORY}{folder}/link"


def is_removed(address: str) -> bool:
    """Whether the folder of this socket file is gone: the folder's maker has ended."""
    scheme, _, path = address.partition("://")
    return scheme != "tcp" and not Path(path).parent.exists()


def listen(
    config: TransportConfig, address: str, nonce: int | None = None, devices: tuple[str, str] = GPU_EACH
) -> Transport:
    """Make the draft's end, without waiting for the target. Raises ConfigError."""
    link = _end(config, address, nonce, devices, "draft")
    assert link is not None
    return link


def connect(config: TransportConfig, address: str, nonce: int, devices: tuple[str, str] = GPU_EACH) -> Transport | None:
    """Make the target's end, without waiting; None if no draft listens yet. Raises ConfigError."""
    return _end(config, address, nonce, devices, "target")


def _end(
    config: TransportConfig, address: str, nonce: int | None, devices: tuple[str, str], role: Role
) -> Transport | None:
    listens = role == "draft"
    link: Transport | None
    if address.startswith(_PROCESS_GROUPS):
        from amusd.transport.torch_distributed import TorchDistributedTransport

        link = TorchDistributedTransport(address, nonce, devices[listens], 0 if listens else 1)
    elif address.startswith(SHARED_MEMORY):
        make = SharedMemoryTransport.bind if listens else SharedMemoryTransport.connect
        link = make(address, nonce)
    else:
        from amusd.transport.zeromq import ZeroMQTransport

        keys = keys_of(config, role)
        link = ZeroMQTransport(address, nonce, listens=listens, insecure=config.insecure, keys=keys)
    if link is not None:
        link.delay_seconds = config.delay_ms / 1e3
    return link


def numbered_link(config: TransportConfig, address: str, number: int, *, listens: bool) -> ZeroMQTransport:
    """One end of a link between two ranks of the target. With keys, both ends prove over TCP to own the target's keys.

    `address`: a private folder, or `tcp://HOST:PORT`; the link's port is PORT + `number`. Raises ConfigError.
    """
    from amusd.transport.zeromq import ZeroMQTransport

    if not address.startswith("tcp://"):
        return ZeroMQTransport(f"ipc://{address}/{number}", 0, listens=listens)
    keys = keys_of(config, "target")
    if keys is not None:
        keys = replace(keys, peer=keys.public)
    host, _, port = address.rpartition(":")
    address = f"{host}:{int(port) + number}"
    return ZeroMQTransport(address, 0, listens=listens, insecure=config.insecure, keys=keys)


def check_link(config: TransportConfig, address: str, role: Role, key: str) -> str:
    """Check the address of an `amusd draft`; return it in libzmq's form. Raises ConfigError.

    The port must be fixed, since the draft listens anew for each target. `key`: the setting of the address.
    """
    config.require(config.kind in ("auto", "zeromq"), "kind", f"not with {key}={address}; allowed: auto, zeromq")
    is_safe = config.insecure or config.keys is not None
    checked, _ = check_address(address, beyond=is_safe, to_bind=False, key=key)
    keys_of(config, role)
    return checked


def keys_of(config: TransportConfig, role: Role) -> Keys | None:
    """The keys of this role's end, or None for a link without. Raises ConfigError."""
    if config.keys is None:
        return None
    from amusd.transport.curve import read_keys

    return read_keys(Path(config.keys), role)
