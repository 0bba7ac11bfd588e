"""Chooses and makes the link between the workers.

Without an address the workers are two processes of this machine. Without ZeroMQ the other links work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from amusd.config import TransportConfig
from amusd.errors import ConfigError
from amusd.transport.base import Transport
from amusd.transport.shared_memory import SHARED_MEMORY, SharedMemoryTransport
from amusd.types import Role

if TYPE_CHECKING:
    from amusd.transport.curve import Keys
    from amusd.transport.zeromq import ZeroMQTransport

GPU_EACH = ("cuda:0", "cuda:1")

ON_ONE_MACHINE: Mapping[str, TransportConfig] = {
    "shared_memory": TransportConfig(kind="shared_memory"),
    "zeromq": TransportConfig(kind="zeromq"),
    "zeromq_tcp": TransportConfig(kind="zeromq", address="tcp://127.0.0.1:0"),
    "gloo": TransportConfig(kind="gloo"),
    "nccl": TransportConfig(kind="nccl"),
}
"""Every link between two processes here; `zeromq` is over a socket file, `zeromq_tcp` over TCP."""


def listen(config: TransportConfig, nonce: int, devices: tuple[str, str] = GPU_EACH) -> Transport:
    """Make the target's end, without waiting for the draft. Raises ConfigError."""
    return _delayed(_listen(config, nonce, devices), config)


def connect(config: TransportConfig, address: str, nonce: int, devices: tuple[str, str] = GPU_EACH) -> Transport:
    """Make the draft's end, for the address and nonce of `listen`, without waiting. Raises ConfigError."""
    return _delayed(_connect(config, address, nonce, devices), config)


def _listen(config: TransportConfig, nonce: int, devices: tuple[str, str]) -> Transport:
    if config.kind == "gloo" or config.kind == "nccl":
        from amusd.transport.torch_distributed import TorchDistributedTransport

        return TorchDistributedTransport.bind(nonce, config.kind, devices)
    if config.kind != "zeromq" and config.address is None:
        try:
            return SharedMemoryTransport.bind(nonce)
        except ConfigError:
            if config.kind == "shared_memory":
                raise
    return _over_zeromq(config, config.address, nonce, "target")


def _connect(config: TransportConfig, address: str, nonce: int, devices: tuple[str, str]) -> Transport:
    if address.startswith(("gloo://", "nccl://")):
        from amusd.transport.torch_distributed import TorchDistributedTransport

        return TorchDistributedTransport(address, nonce, devices[1], 1)
    if address.startswith(SHARED_MEMORY):
        return SharedMemoryTransport.connect(address, nonce)
    return _over_zeromq(config, address, nonce, "draft")


def _over_zeromq(config: TransportConfig, address: str | None, nonce: int, role: Role) -> ZeroMQTransport:
    from amusd.transport.zeromq import ZeroMQTransport

    listens, keys = role == "target", keys_of(config, role)
    return ZeroMQTransport(address, nonce, listens=listens, insecure=config.insecure, keys=keys)


def numbered_link(config: TransportConfig, address: str, number: int, role: Role, *, listens: bool) -> ZeroMQTransport:
    """One end of a link between the target's first rank and another process of its run, whose role is `role`.

    `address`: a private folder, or `tcp://HOST:PORT`, whose port `number` is added to. Both ends of a link between
    ranks prove that they own the target's key. Raises ConfigError.
    """
    from amusd.transport.zeromq import ZeroMQTransport

    if not address.startswith("tcp://"):
        return ZeroMQTransport(f"ipc://{address}/{number}", 0, listens=listens)
    keys = keys_of(config, "target" if listens else role)
    if keys is not None and role == "target":
        keys = replace(keys, peer=keys.public)
    host, _, port = address.rpartition(":")
    address = f"{host}:{int(port) + number}"
    return ZeroMQTransport(address, 0, listens=listens, insecure=config.insecure, keys=keys)


def keys_of(config: TransportConfig, role: Role) -> Keys | None:
    """The keys of this role's end, or None for a link without. Raises ConfigError."""
    if config.keys is None:
        return None
    from amusd.transport.curve import read_keys

    return read_keys(Path(config.keys), role)


def _delayed(link: Transport, config: TransportConfig) -> Transport:
    link.delay_seconds = config.delay_ms / 1e3
    return link
