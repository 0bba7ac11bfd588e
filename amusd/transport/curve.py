"""Keys of a link between machines: a pair for each role, in a folder whose path both ends get.

    target.key  target.key_secret     the end that connects
    draft.key   draft.key_secret      the end that listens

A `.key` file holds a public key, a `.key_secret` file both (`zmq.auth`). The draft lets in the owner of `target.key`;
the target trusts the owner of `draft.key`. A machine needs its own role's secret and the other role's public key.
Ranks of one target share its secret.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth import create_certificates, load_certificate
from zmq.auth.thread import ThreadAuthenticator

from amusd.errors import ConfigError
from amusd.files import make_new_folder
from amusd.types import Role

_DOMAIN = "amusd"  # libzmq's name for the list of keys; without one every valid key is let in


@dataclass(frozen=True)
class Keys:
    """The keys of one end: CURVE25519, 40 characters in Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    peer: bytes
    """Public key of the other end."""

    def callback(self, _domain: str, key: bytes) -> bool:
        """Called by pyzmq's authenticator: whether this public key may connect."""
        return key == self.peer


def use_keys(socket: zmq.Socket[bytes], keys: Keys, *, listens: bool) -> ThreadAuthenticator | None:
    """Restrict an unbound or unconnected socket to the owner of `keys.peer`.

    Returns the authenticator of a listening socket, to be stopped when the socket closes. Raises ZMQError for bad keys.
    """
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)
    if not listens:
        socket.set(zmq.CURVE_PUBLICKEY, keys.public)
        socket.set(zmq.CURVE_SERVERKEY, keys.peer)
        return None
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.ZAP_DOMAIN, _DOMAIN.encode())
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
    authenticator = ThreadAuthenticator(socket.context)
    authenticator.configure_curve_callback(_DOMAIN, keys)
    authenticator.start()
    return authenticator


def write_keys(folder: Path) -> None:
    """Make a pair of keys for each role in a new or empty folder. Raises ConfigError for another."""
    make_new_folder(folder, 0o700)
    try:
        folder.chmod(0o700)
        for role in ("target", "draft"):
            public, secret = create_certificates(folder, role)
            Path(public).chmod(0o644)
            Path(secret).chmod(0o600)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be used: {error.strerror}") from None


def read_keys(folder: Path, role: Role) -> Keys:
    """The keys of this role. Raises ConfigError when one is missing, or others could have read a secret."""
    own, other = folder / f"{role}.key_secret", "target" if role == "draft" else "draft"
    public, secret = _read(own)
    peer, _ = _read(folder / f"{other}.key")
    if mode := stat.S_IMODE(own.stat().st_mode) & 0o077:
        raise ConfigError(f"transport.keys={folder}: {own.name} can be used by others (mode {mode:03o}); chmod 600 it")
    return Keys(public, secret, peer)


def _read(path: Path) -> tuple[bytes, bytes]:
    """Public and secret key of a file; the secret is empty in a `.key` file. Raises ConfigError, quoting no key."""
    try:
        public, secret = load_certificate(path)
    except (OSError, ValueError, IndexError):
        public, secret = b"", None
    keys = (public, secret) if path.suffix == ".key_secret" else (public,)
    if any(key is None or len(key) != 40 for key in keys):
        raise ConfigError(f"transport.keys={path.parent}: {path.name}: no keys in it; `amusd keys FOLDER` makes them")
    return public, secret or b""
