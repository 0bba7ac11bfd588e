"""Chooses and makes the link between the workers.

Without an address the workers are two processes of this machine. Libraries are imported when a link is made: without
ZeroMQ the other links work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

from amusd.config import TransportConfig
from amusd.errors import ConfigError
from amusd.transport.addresses import LOOPBACK, SHARED_MEMORY, TORCH_DISTRIBUTED
from amusd.transport.base import Rendezvous, Transport
from amusd.transport.delayed import DelayedTransport
from amusd.types import Role

if TYPE_CHECKING:
    from amusd.transport.curve import Keys
    from amusd.transport.zeromq import ZeroMQTransport

GPU_EACH = ("cuda:0", "cuda:1")

Link: TypeAlias = Literal["shared_memory", "zeromq", "zeromq_tcp", "gloo", "nccl"]
"""Names of links; `zeromq` is over a socket file, `zeromq_tcp` over TCP."""

ON_ONE_MACHINE: Mapping[Link, TransportConfig] = MappingProxyType(
    {
        "shared_memory": TransportConfig(kind="shared_memory"),
        "zeromq": TransportConfig(kind="zeromq"),
        "zeromq_tcp": TransportConfig(kind="zeromq", address="tcp://127.0.0.1:0"),
        "gloo": TransportConfig(kind="gloo"),
        "nccl": TransportConfig(kind="nccl"),
    }
)

_AUTO: tuple[Link, ...] = ("shared_memory", "zeromq", "zeromq_tcp")


def listen(config: TransportConfig, nonce: int, devices: tuple[str, str] = GPU_EACH) -> Transport:
    """Make the target's end, without waiting for the draft. Raises ConfigError."""
    _, link = _listen(config, nonce, devices)
    return _delayed(link, config)


def connect(config: TransportConfig, rendezvous: Rendezvous, devices: tuple[str, str] = GPU_EACH) -> Transport:
    """Make the draft's end, for the address of `listen`, without waiting. Raises ConfigError."""
    return _delayed(_connect(config, rendezvous, devices), config)


def choose_here(config: TransportConfig, devices: tuple[str, str] = GPU_EACH) -> Link:
    """Name the link that `listen` takes on this machine, by trying it. Raises ConfigError."""
    choice, link = _listen(config, 0, devices)
    link.close()
    return choice


def can_listen_again(config: TransportConfig) -> bool:
    """Whether `listen` can make a fresh link after a draft is lost."""
    return config.kind in ("auto", "shared_memory", "zeromq")


def _listen(config: TransportConfig, nonce: int, devices: tuple[str, str]) -> tuple[Link, Transport]:
    failures = []
    for link in _candidates(config):
        try:
            return link, _bind(link, config, nonce, devices)
        except ConfigError as error:  # noqa: PERF203 - the first link that works ends it
            failures.append(str(error))
    raise ConfigError("; ".join(failures))


def _candidates(config: TransportConfig) -> tuple[Link, ...]:
    if config.kind == "gloo" or config.kind == "nccl":
        return (config.kind,)
    if config.address is not None:
        return ("zeromq_tcp",) if config.address.startswith("tcp:") else ("zeromq",)
    if config.kind == "auto":
        return _AUTO
    return (config.kind,)


def _bind(link: Link, config: TransportConfig, nonce: int, devices: tuple[str, str]) -> Transport:
    if link == "gloo" or link == "nccl":
        from amusd.transport.torch_distributed import TorchDistributedTransport

        return TorchDistributedTransport.bind(
            config.address, nonce, backend=link, devices=devices, insecure=config.insecure
        )
    if link == "shared_memory":
        try:
            from amusd.transport.shared_memory import SharedMemoryTransport
        except ImportError as error:  # not a Unix system
            raise ConfigError(f"transport=shared_memory: not on this system, use transport=zeromq: {error}") from None
        return SharedMemoryTransport.bind(nonce)
    address = LOOPBACK if link == "zeromq_tcp" and config.address is None else config.address
    return _zeromq().bind(address, nonce, insecure=config.insecure, keys=keys_of(config, Role.TARGET))


def _connect(config: TransportConfig, rendezvous: Rendezvous, devices: tuple[str, str]) -> Transport:
    address, nonce = rendezvous.address, rendezvous.nonce
    if address.startswith(TORCH_DISTRIBUTED):
        from amusd.transport.torch_distributed import TorchDistributedTransport

        return TorchDistributedTransport.connect(address, nonce, devices=devices, insecure=config.insecure)
    if address.startswith(SHARED_MEMORY):
        from amusd.transport.shared_memory import SharedMemoryTransport

        return SharedMemoryTransport.connect(address, nonce)
    return _zeromq().connect(address, nonce, insecure=config.insecure, keys=keys_of(config, Role.DRAFT))


def numbered_link(config: TransportConfig, address: str, number: int, role: Role, *, listens: bool) -> ZeroMQTransport:
    """One end of a link between the target's first rank and another process of its run, whose role is `role`.

    `address`: a private folder, or `tcp://HOST:PORT`, whose port `number` is added to. Both ends of a link between
    ranks prove that they own the target's key. Raises ConfigError.
    """
    make = _zeromq().bind if listens else _zeromq().connect
    if not address.startswith("tcp://"):
        return make(f"ipc://{address}/{number}", 0)
    keys = keys_of(config, Role.TARGET if listens else role)
    if keys is not None and role is Role.TARGET:
        keys = replace(keys, peers=frozenset({keys.public}))
    host, _, port = address.rpartition(":")
    return make(f"{host}:{int(port) + number}", 0, insecure=config.insecure, keys=keys)


def _zeromq() -> type[ZeroMQTransport]:
    try:
        from amusd.transport.zeromq import ZeroMQTransport
    except ImportError as error:
        raise ConfigError(f"transport=zeromq: needs ZeroMQ: pip install pyzmq ({error})") from None
    return ZeroMQTransport


def keys_of(config: TransportConfig, role: Role) -> Keys | None:
    """The keys of this role's end, or None for a link without. Raises ConfigError."""
    if config.keys is None:
        return None
    from amusd.transport.curve import read_keys

    return read_keys(Path(config.keys), role)


def _delayed(link: Transport, config: TransportConfig) -> Transport:
    return DelayedTransport(link, config.delay_ms / 1e3) if config.delay_ms else link
