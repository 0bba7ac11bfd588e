"""Keys of a link between machines: a pair for each role, made once, in a folder whose path both ends are told.

    target.key  target.key_secret     the end that listens
    draft.key   draft.key_secret      the end that connects

A `.key` file holds a public key, a `.key_secret` file both; their format is that of `zmq.auth`. The target lets in
every owner of the secret of a `draft*.key` in its folder, so that a second draft is one more file; the draft talks to
the owner of `target.key` alone. A machine needs its own role's secret and the other role's public key, and no more.
Ranks of one target have the target's secret, and talk to each other by it.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from amusd.errors import ConfigError
from amusd.files import make_new_folder
from amusd.types import Role

_LINE = r'^\s*{name}-key\s*=\s*"([0-9A-Za-z.:+=^!/*?&<>()\[\]{{}}@%$#-]{{40}})"\s*$'
_DOMAIN = "amusd"  # names the list of keys to libzmq; without a domain it would let in every key that works
_FOLDER_MODE = 0o700
_SECRET_MODE = 0o600
_PUBLIC_MODE = 0o644


@dataclass(frozen=True)
class Keys:
    """The keys of one end: CURVE25519, 40 characters in Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    peers: frozenset[bytes]
    """Public keys of those that this end talks to; of the draft's end exactly one."""

    def callback(self, _domain: str, key: bytes) -> bool:
        """True when a connection with this public key may come in; pyzmq's authenticator asks."""
        return key in self.peers


def serve_with(socket: zmq.Socket[bytes], keys: Keys) -> ThreadAuthenticator:
    """Have an unbound socket let in the owners of `keys.peers` only; `stop` what is returned when it closes."""
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)
    socket.set(zmq.ZAP_DOMAIN, _DOMAIN.encode())
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
    authenticator = ThreadAuthenticator(socket.context)
    authenticator.configure_curve_callback(_DOMAIN, keys)
    authenticator.start()
    return authenticator


def ask_with(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Have a socket that is not connected yet talk to the owner of `keys.peers` only."""
    (server,) = keys.peers
    socket.set(zmq.CURVE_SERVERKEY, server)
    socket.set(zmq.CURVE_PUBLICKEY, keys.public)
    socket.set(zmq.CURVE_SECRETKEY, keys.secret)


def write_keys(folder: Path) -> None:
    """Make a pair of keys for each role in a new folder. Raises ConfigError rather than write beside other files."""
    make_new_folder(folder, _FOLDER_MODE)
    try:
        folder.chmod(_FOLDER_MODE)
        for role in Role:
            public, secret = zmq.curve_keypair()
            public_path, secret_path = _paths(folder, role)
            _write(public_path, {"public": public}, _PUBLIC_MODE)
            _write(secret_path, {"public": public, "secret": secret}, _SECRET_MODE)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be used: {error.strerror}") from None


def read_keys(folder: Path, role: Role) -> Keys:
    """The keys for the end of this role. Raises ConfigError when one is missing, or others could have read a secret."""
    secret_path = _paths(folder, role)[1]
    text = _read_secret(secret_path)
    public, secret = _key(text, "public", secret_path), _key(text, "secret", secret_path)
    # a draft talks to one target; a target to every draft whose key it has been given
    paths = [_paths(folder, Role.TARGET)[0]] if role is Role.DRAFT else sorted(folder.glob("draft*.key"))
    if not paths:
        raise ConfigError(f"transport.keys={folder}: has no draft*.key, so that no draft could come in")
    return Keys(public, secret, frozenset(_key(_read(path), "public", path) for path in paths))


def _paths(folder: Path, role: Role) -> tuple[Path, Path]:
    """Files of the public key and of the secret one."""
    return folder / f"{role.value}.key", folder / f"{role.value}.key_secret"


def _write(path: Path, keys: dict[str, bytes], mode: int) -> None:
    lines = ["curve", *(f'    {name}-key = "{key.decode()}"' for name, key in keys.items())]
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="ascii") as file:
        file.write("\n".join(lines) + "\n")


def _read_secret(path: Path) -> str:
    text = _read(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(
            f"transport.keys={path.parent}: {path.name} can be used by others (mode {mode:04o}); chmod 600 it"
        )
    return text


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="latin-1")
    except OSError as error:
        raise ConfigError(
            f"transport.keys={path.parent}: {path.name}: {error.strerror}; `amusd keys FOLDER` makes keys"
        ) from None


def _key(text: str, name: str, path: Path) -> bytes:
    """One key of a file. Raises ConfigError, which never quotes the file."""
    match = re.search(_LINE.format(name=name), text, re.MULTILINE)
    if match is None:
        raise ConfigError(f"transport.keys={path.parent}: {path.name} holds no {name} key")
    return match[1].encode("ascii")
