"""From the configuration to a link between processes. Links inside one process are made in Python only."""

from __future__ import annotations

import zmq

from amusd.config import TransportConfig
from amusd.errors import ConfigError
from amusd.transport.addresses import LOOPBACK
from amusd.transport.base import Listener, Rendezvous, Transport
from amusd.transport.zeromq import ZeroMQTransport


def listen(config: TransportConfig, nonce: int) -> Listener:
    """The target's end; does not wait for the draft. Raises ConfigError.

    Without an address: a private socket file, and under `auto` loopback TCP where socket files do not work.
    """
    if config.address is not None:
        return ZeroMQTransport.bind(config.address, nonce, insecure=config.insecure)
    try:
        if zmq.has("ipc") or config.kind == "zeromq":
            return ZeroMQTransport.bind(None, nonce)
    except ConfigError:
        if config.kind == "zeromq":
            raise
    return ZeroMQTransport.bind(LOOPBACK, nonce)


def connect(config: TransportConfig, rendezvous: Rendezvous) -> Transport:
    """The draft's end, to where `listen` said it listens; does not wait for the target. Raises ConfigError."""
    return ZeroMQTransport.connect(rendezvous.address, rendezvous.nonce, insecure=config.insecure)
