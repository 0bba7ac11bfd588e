"""Keys of a link between machines: a pair for each role, in a folder whose path both ends are told.

    target.key  target.key_secret     the end that listens
    draft.key   draft.key_secret      the end that connects

A `.key` file holds a public key, a `.key_secret` file both (`zmq.auth`). The target lets in owners of a `draft*.key` in
its folder; the draft talks to the owner of `target.key`. A machine needs its own role's secret and the other role's
public key. Ranks of one target share its secret.
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

_DOMAIN = "amusd"  # names the list of keys to libzmq; without a domain it would let in every key that works
_KEY_LENGTH = 40


@dataclass(frozen=True)
class Keys:
    """The keys of one end: CURVE25519, 40 characters in Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    peers: frozenset[bytes]
    """Public keys that this end talks to; for the draft exactly one."""

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a connection with this public key may come in; pyzmq's authenticator asks."""
        return key in self.peers


def serve_with(socket: zmq.Socket[bytes], keys: Keys) -> ThreadAuthenticator:
    """Let only the owners of `keys.peers` into an unbound socket; `stop` what is returned when it closes."""
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)
    socket.set(zmq.ZAP_DOMAIN, _DOMAIN.encode())
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
    authenticator = ThreadAuthenticator(socket.context)
    authenticator.configure_curve_callback(_DOMAIN, keys)
    authenticator.start()
    return authenticator


def ask_with(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Make an unconnected socket talk to the owner of `keys.peers` only."""
    (server,) = keys.peers
    socket.set(zmq.CURVE_SERVERKEY, server)
    socket.set(zmq.CURVE_PUBLICKEY, keys.public)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)


def write_keys(folder: Path) -> None:
    """Make a pair of keys for each role in a new folder. Raises ConfigError if it exists."""
    make_new_folder(folder, 0o700)
    try:
        folder.chmod(0o700)
        for role in Role:
            public, secret = create_certificates(folder, role.value)
            Path(public).chmod(0o644)
            Path(secret).chmod(0o600)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be used: {error.strerror}") from None


def read_keys(folder: Path, role: Role) -> Keys:
    """The keys of this role. Raises ConfigError when one is missing, or others could have read a secret."""
    public, secret = _read(folder / f"{role.value}.key_secret")
    # a draft talks to one target; a target to every draft whose key it has been given
    paths = [folder / f"{Role.TARGET.value}.key"] if role is Role.DRAFT else sorted(folder.glob("draft*.key"))
    if not paths:
        raise ConfigError(f"transport.keys={folder}: has no draft*.key, so that no draft could come in")
    return Keys(public, secret, frozenset(_read(path)[0] for path in paths))


def _read(path: Path) -> tuple[bytes, bytes]:
    """Public key, and secret one if wanted. Raises ConfigError, without quoting the file."""
    is_secret, where = path.suffix == ".key_secret", f"transport.keys={path.parent}: {path.name}"
    try:
        public, secret = load_certificate(path)
        mode = stat.S_IMODE(path.stat().st_mode)
    except (OSError, ValueError, IndexError):
        raise ConfigError(f"{where}: no keys can be read there; `amusd keys FOLDER` makes them") from None
    keys = (public, secret or b"") if is_secret else (public, b"")
    if any(len(key) != _KEY_LENGTH for key in keys[: 1 + is_secret]):
        raise ConfigError(f"{where} holds no {'pair of keys' if is_secret else 'key'} of {_KEY_LENGTH} characters")
    if is_secret and mode & 0o077:
        raise ConfigError(f"{where} can be used by others (mode {mode:04o}); chmod 600 it")
    return keys
