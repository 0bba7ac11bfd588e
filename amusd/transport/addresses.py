"""Addresses of links: which ones there are, and which ones stay on this machine."""

from __future__ import annotations

import ipaddress
import socket
import struct
from dataclasses import dataclass

from amusd.errors import ConfigError

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface

LOOPBACK = "tcp://127.0.0.1:*"
"""Loopback TCP on a port that is free."""

SHARED_MEMORY = "shm://"
"""Scheme of a shared-memory link; its address is picked, never configured."""

TORCH_DISTRIBUTED = ("gloo://", "nccl://")
"""Schemes of a `torch.distributed` link when the draft is told; configured as `tcp://HOST:PORT`."""


@dataclass(frozen=True)
class Endpoint:
    """An address that has been checked."""

    address: str
    """The address in the form of libzmq: `ipc://PATH` or `tcp://IP:PORT`; the port `*` stands for a free one."""
    is_local: bool
    """True when only this machine can reach it."""
    host: str = ""
    """TCP only: address or name, an IPv6 address without its brackets."""
    port: int = 0
    """TCP only; 0 stands for a free one."""


def parse_endpoint(address: str, *, beyond: bool, to_bind: bool) -> Endpoint:
    """Check an address for binding or connecting. Raises ConfigError.

    `beyond`: it may lie beyond this machine, because the link has keys or is meant to be open.
    """
    scheme, _, rest = address.partition("://")
    if scheme == "ipc" and rest:
        return Endpoint(address, is_local=True)
    host, _, port = rest.rpartition(":")
    if to_bind and port == "*":
        port = "0"
    is_port = port.isascii() and port.isdigit() and (0 if to_bind else 1) <= int(port) <= 65535
    if scheme != "tcp" or not host or not is_port:
        ports = "1 to 65535, or * for a free one" if to_bind else "1 to 65535"
        raise ConfigError(f"transport.address={address}: expected ipc://PATH or tcp://HOST:PORT, PORT from {ports}")
    if host == "localhost":
        host = "127.0.0.1"  # libzmq binds to no host names
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_local = _is_loopback(bare)
    if not is_local and not beyond:
        raise ConfigError(
            f"transport.address={address}: not on this machine, and the link is neither encrypted nor authenticated; "
            "give both ends transport.keys=FOLDER (`amusd keys FOLDER` makes it), or, on a network you trust, set "
            "transport.insecure=true"
        )
    return Endpoint(f"tcp://{host}:{port if int(port) else '*'}", is_local=is_local, host=bare, port=int(port))


def address_towards(host: str, port: int) -> str:
    """The address of this machine that the one at `host` sees; `port` is any. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def interface_address(interface: str) -> str:
    """The IPv4 address of a network interface of this machine, given by its name or address. Raises ConfigError."""
    return _named(interface)[1]


def interface_name(interface: str) -> str:
    """The name of a network interface, given as to `interface_address`. Raises ConfigError."""
    return _named(interface)[0]


def _named(interface: str) -> tuple[str, str]:
    """Name and address of an interface that is given by one of them."""
    if _is_loopback(interface):
        return "lo", interface  # which has more addresses than it tells
    found = {name: address for _, name in socket.if_nameindex() if (address := _address_of(name)) is not None}
    for name, address in found.items():
        if interface in (name, address):
            return name, address
    names = ", ".join(f"{name} ({address})" for name, address in found.items())
    raise ConfigError(f"transport.interface={interface}: this machine has {names or 'none with an IPv4 address'}")


def _address_of(name: str) -> str | None:
    """The IPv4 address of an interface; None without one. Linux alone tells."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(
                fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24]
            )
        except OSError:
            return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name, an interface or a wildcard: whatever it stands for may be elsewhere
