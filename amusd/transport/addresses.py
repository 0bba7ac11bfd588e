"""Addresses of links: the valid ones, and those that stay on this machine."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from amusd.errors import ConfigError, first_line


def check_address(address: str, *, beyond: bool, to_bind: bool, key: str = "transport.address") -> tuple[str, bool]:
    """Return an address in libzmq's form, and whether it stays on this machine. Raises ConfigError.

    `beyond`: allow addresses beyond this machine. `to_bind`: allow a free port. `key`: the setting's name.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        return address, True
    host, _, port = rest.rpartition(":")
    is_number = len(port) <= 5 and port.isascii() and port.isdigit() and (0 if to_bind else 1) <= int(port) <= 65535
    is_port = is_number or (to_bind and port == "*")
    if scheme != "tcp" or not host or not is_port:
        free = ", or * for a free one" if to_bind else ""
        raise ConfigError(f"{key}={address}: expected ipc://PATH or tcp://HOST:PORT, PORT from 1 to 65535{free}")
    if host == "localhost":
        host = "127.0.0.1"  # libzmq binds to no host names
    is_local = is_loopback(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
    if not is_local and not beyond:
        ways = "transport.keys=FOLDER (of `amusd keys FOLDER`), or, on a network you trust, transport.insecure=true"
        told = "not on this machine, and the link is neither encrypted nor authenticated"
        raise ConfigError(f"{key}={address}: {told}; give both ends {ways}")
    return f"tcp://{host}:{port}", is_local


def address_towards(address: str) -> str:
    """This machine's own address on the route to `tcp://HOST:PORT`. Raises ConfigError without a route."""
    try:
        there = urlsplit(address)
        family, kind, protocol, _, place = socket.getaddrinfo(there.hostname, there.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:  # ValueError: not a host name
        raise ConfigError(f"transport.address={address}: {first_line(error)}") from None


def is_loopback(host: str) -> bool:
    """Whether this is an IP address that only this machine can reach; False for a name, interface or wildcard."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
