"""Decides, for one listening socket, whose key lets a connection in; libzmq asks before it reads a message.

The question comes over ZeroMQ's authentication protocol, in the socket's own context; the thread that answers it waits
for nothing else, and ends with the context.

References:
    https://rfc.zeromq.org/spec/27/ (ZAP).
"""

from __future__ import annotations

import threading
from collections.abc import Collection

import zmq
from zmq.utils import z85

DOMAIN = b"amusd"
"""Names the list to libzmq; without a domain it would let everyone in whose keys work."""

_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


def keep_door(context: zmq.Context[zmq.Socket[bytes]], allowed: Collection[bytes]) -> None:
    """From now on let in those with one of these public keys (Z85), and nobody else."""
    socket = context.socket(zmq.REP)
    socket.linger = 0
    socket.bind(_ADDRESS)
    threading.Thread(target=_answer, args=(socket, frozenset(allowed)), name="doorkeeper", daemon=True).start()


def _answer(socket: zmq.Socket[bytes], allowed: frozenset[bytes]) -> None:
    with socket:
        try:
            while True:
                version, request, domain, _address, _identity, mechanism, *credentials = socket.recv_multipart()
                fits = version == _VERSION and domain == DOMAIN and mechanism == b"CURVE" and len(credentials) == 1
                is_known = fits and z85.encode(credentials[0]) in allowed
                status, reason = (b"200", b"OK") if is_known else (b"400", b"unknown key")
                socket.send_multipart([_VERSION, request, status, reason, b"", b""])
        except zmq.ContextTerminated:
            return
