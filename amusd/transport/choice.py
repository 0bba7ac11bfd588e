"""Which link joins the two workers, and why: the one rule that `transport=auto` follows.

Pure: it is told what is wished for and which links turned out not to work here, and tries none itself (`factory.py`
does). Where the workers are follows from the address: without one they are two processes of this machine, and so they
are with an address that only this machine can reach. Links within one process are made in Python only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from amusd.config import TransportConfig
from amusd.errors import ConfigError
from amusd.transport.addresses import parse_endpoint

Link: TypeAlias = Literal["shared_memory", "zeromq", "zeromq_tcp", "gloo", "nccl"]
"""As `transport=` calls it; `zeromq` over a socket file, `zeromq_tcp` over TCP."""

ON_ONE_MACHINE: Mapping[Link, TransportConfig] = MappingProxyType(
    {
        "shared_memory": TransportConfig(kind="shared_memory"),
        "zeromq": TransportConfig(kind="zeromq"),
        "zeromq_tcp": TransportConfig(kind="zeromq", address="tcp://127.0.0.1:0"),
        "gloo": TransportConfig(kind="gloo"),
        "nccl": TransportConfig(kind="nccl"),
    }
)
"""How each is asked for between two processes of one machine."""

_REASONS: Mapping[Link, str] = {
    "shared_memory": "two processes of one machine, and nothing but memory lies between them",
    "zeromq": "two processes of one machine, where shared memory does not work",
    "zeromq_tcp": "two processes of one machine, where neither shared memory nor socket files work",
}
"""Why `auto` takes it where there is no address. In the order in which it looks."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The link that is taken."""

    link: Link
    reason: str
    """One line, without the name of the link."""


def typed(link: Link) -> str:
    """What to type to have this link between two processes of one machine."""
    config = ON_ONE_MACHINE[link]
    return f"transport={config.kind}" + ("" if config.address is None else f" transport.address={config.address}")


def choose(config: TransportConfig, failed: Mapping[Link, str]) -> Choice:
    """The best link that `config` allows, but for those that have `failed` here, with why they did.

    Raises `ConfigError` when none is left, or for a malformed address.
    """
    links = _allowed(config)
    left = [link for link in links if link not in failed]
    if not left:
        raise ConfigError("; ".join(failed[link] for link in links))
    return Choice(left[0], _reason(config, left[0]))


def _allowed(config: TransportConfig) -> tuple[Link, ...]:
    """The best first. gloo and NCCL only where they are asked for: a draft that is lost over them is not replaced."""
    if config.kind == "gloo" or config.kind == "nccl":
        return (config.kind,)
    if config.address is not None:
        return ("zeromq_tcp",) if config.address.startswith("tcp:") else ("zeromq",)
    if config.kind == "auto":
        return tuple(_REASONS)
    return (config.kind,)


def _reason(config: TransportConfig, link: Link) -> str:
    if config.kind != "auto":
        return f"transport={config.kind} asks for it"
    if config.address is None:
        return _REASONS[link]
    if parse_endpoint(config.address, beyond=True, to_bind=True).is_local:
        return f"two processes of one machine that are to meet at {config.address}"
    return f"two machines, at {config.address}: it can be encrypted, and a lost draft is replaced over it"
