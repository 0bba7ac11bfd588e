"""Addresses of links: which ones there are, and which ones stay on this machine."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from amusd.errors import ConfigError


@dataclass(frozen=True)
class Endpoint:
    """An address that has been checked."""

    address: str
    is_local: bool
    host: str = ""
    """TCP only; an IPv6 address has no brackets."""
    port: int = 0


def parse_endpoint(address: str, *, beyond: bool, to_bind: bool) -> Endpoint:
    """Check an address for binding or connecting. Raises ConfigError.

    `beyond`: allow addresses beyond this machine.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        return Endpoint(address, is_local=True)
    host, _, port = rest.rpartition(":")
    if to_bind and port == "*":
        port = "0"
    is_port = port.isascii() and port.isdigit() and (0 if to_bind else 1) <= int(port) <= 65535
    if scheme != "tcp" or not host or not is_port:
        expected = "ipc://PATH or tcp://HOST:PORT, PORT from 1 to 65535, or * where it listens at a free one"
        raise ConfigError(f"transport.address={address}: expected {expected}")
    if host == "localhost":
        host = "127.0.0.1"  # libzmq binds to no host names
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_local = is_loopback(bare)
    if not is_local and not beyond:
        raise ConfigError(
            f"transport.address={address}: not on this machine, and the link is neither encrypted nor authenticated; "
            "give both ends transport.keys=FOLDER (`amusd keys FOLDER` makes it), or, on a network you trust, set "
            "transport.insecure=true"
        )
    return Endpoint(f"tcp://{host}:{port if int(port) else '*'}", is_local=is_local, host=bare, port=int(port))


def address_towards(host: str, port: int) -> str:
    """This machine's address as seen from `host`. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Whether this is an address of this machine alone; a name, an interface or a wildcard is none."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
