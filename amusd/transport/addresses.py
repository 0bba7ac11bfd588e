"""What an address of a link may be, and which ones stay on this machine."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from amusd.errors import ConfigError

LOOPBACK = "tcp://127.0.0.1:*"
"""Loopback TCP on a port that is free."""

SHARED_MEMORY = "shm://"
"""How the address of a shared-memory link begins; it is picked, never configured."""

TORCH_DISTRIBUTED = ("gloo://", "nccl://")
"""How the address of a `torch.distributed` link begins when the draft is told; configured as `tcp://HOST:PORT`."""


@dataclass(frozen=True)
class Endpoint:
    """An address that has been checked."""

    address: str
    """As libzmq takes it: `ipc://PATH` or `tcp://IP:PORT`; the port `*` stands for a free one."""
    is_local: bool
    """Whether only this machine can reach it."""


def parse_endpoint(address: str, *, beyond: bool, to_bind: bool) -> Endpoint:
    """Check an address for binding or connecting. Raises ConfigError.

    `beyond`: it may lie beyond this machine, because the link has keys or is meant to be open.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        return Endpoint(address, is_local=True)
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not _is_port(port, to_bind=to_bind):
        ports = "1 to 65535, or * for a free one" if to_bind else "1 to 65535"
        raise ConfigError(f"transport.address={address}: expected ipc://PATH or tcp://HOST:PORT, PORT from {ports}")
    if host == "localhost":
        host = "127.0.0.1"  # libzmq binds to no host names
    is_local = _is_loopback(host)
    if not is_local and not beyond:
        raise ConfigError(
            f"transport.address={address}: not on this machine, and the link is neither encrypted nor authenticated; "
            "give both ends transport.keys=FOLDER (`amusd keys FOLDER` makes it), or, on a network you trust, set "
            "transport.insecure=true"
        )
    return Endpoint(f"tcp://{host}:{'*' if port == '0' else port}", is_local=is_local)


def _is_port(port: str, *, to_bind: bool) -> bool:
    if to_bind and port in ("*", "0"):
        return True
    return port.isascii() and port.isdigit() and 1 <= int(port) <= 65535


def _is_loopback(host: str) -> bool:
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False  # a name, an interface or a wildcard: whatever it stands for may be elsewhere
