"""A process of torchrun's between the first and the last: looks after further ranks of the target.

It starts them as the target's process starts its own (`amusd/runtime/followers.py`), and where the target is on another
machine it stands between them and the first rank (`amusd/transport/tunnel.py`).
"""

from __future__ import annotations

import dataclasses
import tempfile
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from amusd.console import tell
from amusd.errors import ConfigError, PeerError, PeerLostError
from amusd.runtime.cores import allowed_cores
from amusd.runtime.followers import Followers
from amusd.transport.factory import keys_of
from amusd.types import Role

from .devices import set_nccl
from .drafts import OVER, reported_failure
from .job import Group, Options, store_secret
from .nodes import join, left, own_transport, ranks_of, told_group, with_interface
from .store import Place, Store

if TYPE_CHECKING:
    from amusd.transport.curve import Keys
    from amusd.transport.tunnel import Tunnel

_FINISH_SECONDS = 30.0
"""After the ranks here have ended without a failure: how long the target may take to say that all is over."""
_RETURN_SECONDS = 2.0
"""After the first rank has ended: how long the others may take."""


def run_further_ranks(options: Options, place: Place) -> int:
    """Keep the ranks running until the first one ends; return the exit code, which is 0 where that one says the reason.

    On another machine what ended a rank here is raised.
    """
    store, is_target_gone = None, False
    try:
        store = join(place, store_secret(options))
        group = told_group(place, store)
        if isinstance(group, int):
            return group
        is_target_gone = _follow(options, place, group, store)
    except (ConfigError, PeerError) as error:
        if store is not None:
            with suppress(PeerLostError):  # nobody is left to tell
                store.put("failure", {"users_mistake": isinstance(error, ConfigError), "line": str(error)})
        if place.is_away:
            raise
        return 0
    finally:
        with suppress(PeerLostError):
            if store is not None and not is_target_gone:  # else the store may not answer
                store.put(left(place.rank), True)
    if is_target_gone:
        raise PeerLostError("the target's machine is gone or out of reach, or its process was killed")
    if place.is_away:
        tell("the target has finished, and so have its ranks on this machine")
    return 0


def _follow(options: Options, place: Place, group: Group, store: Store) -> bool:
    """Keep the ranks running; return whether the target's machine is gone. Raises why a rank has failed."""
    config = group.config
    if config.transport.interface is not None:  # whatever it is told: a process decides by itself how it connects
        config = dataclasses.replace(config, transport=with_interface(own_transport(options), place))
    set_nccl(config.transport)
    followers = Followers(tell)
    with ExitStack() as stack:
        stack.callback(followers.stop, _RETURN_SECONDS)
        engine = config.engine_for(group.command)
        ranks = ranks_of(place.rank, place.size, engine.target_tensor_parallel_size)
        followers.prepare(engine, allowed_cores(), options.roles, ranks)
        if store.await_any(("ranks", *OVER), config.startup_timeout_seconds) != "ranks":
            return False
        address = store.get("ranks", config.startup_timeout_seconds)
        if config.transport.interface is None:
            followers.start(address)
            tunnel = None
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="amusd-ranks-"))
            tunnel = reach(store, address, folder, keys_of(config.transport, Role.DRAFT))
            if tunnel is None:
                return False
            stack.enter_context(closing(tunnel))
            followers.start(folder)
        failure = followers.await_end()
        is_lost = tunnel is not None and tunnel.is_lost
        if failure is not None and not is_lost:
            raise failure
    try:
        if not is_lost:
            store.await_any(("finished",), _FINISH_SECONDS)
    except PeerLostError:
        is_lost = True
    return is_lost


def reach(store: Store, address: str, folder: str, keys: Keys | None) -> Tunnel | None:
    """A way to the first rank's machine from a new socket file in `folder`; None where the run has ended meanwhile.

    Raises what has ended it, and `ConfigError` where nobody answers at `address`.
    """
    from amusd.models.ranks import COMMANDS
    from amusd.transport.tunnel import Tunnel

    try:
        return Tunnel.connect(address, Path(folder) / COMMANDS, keys)
    except ConfigError as error:  # also where the port has ended with the run
        failure = reported_failure(store)
        if failure is None and store.has("finished"):
            return None
        raise failure or error from None
