"""A draft that has all that a draft needs, the secret of the store included, but no key of the link.

Stands where `run.py` does, with the arguments KEYS SECONDS: says why it failed; ends with 0 if the target spoke to it.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from amusd.errors import ConfigError, PeerError
from amusd.protocol.messages import PROTOCOL_VERSION, Hello
from amusd.runtime.handshake import await_hello
from amusd.transport.curve import read_store_key
from amusd.transport.zeromq import ZeroMQTransport
from amusd.types import Role
from launch.nodes import here, own_member
from launch.store import Store, place_from_environment

HELLO = Hello(PROTOCOL_VERSION, Role.DRAFT, 1, 0, "", ("hf",))
STORE_SECONDS = 60.0


def main() -> None:
    keys, seconds = sys.argv[1:]
    place = place_from_environment()
    store = Store(place, read_store_key(Path(keys)))
    store.put(here(place.rank), dataclasses.asdict(own_member()))
    store.put("draft", {"incarnation": HELLO.incarnation, "pid": os.getpid()})
    rendezvous = store.get("rendezvous/1", STORE_SECONDS)
    link = ZeroMQTransport.connect(rendezvous["address"], rendezvous["nonce"], insecure=True)
    try:
        await_hello(link, HELLO, float(seconds))
    except (ConfigError, PeerError) as error:
        sys.exit(str(error))
    finally:
        link.close()


if __name__ == "__main__":
    main()
