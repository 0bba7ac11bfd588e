"""A process of torchrun's between the first and the last: looks after further ranks of the target.

It starts them as the target's process starts its own (`amusd/runtime/followers.py`).
"""

from __future__ import annotations

import os
from contextlib import suppress

from amusd.console import tell
from amusd.errors import ConfigError, PeerError, PeerLostError
from amusd.runtime.cores import allowed_cores
from amusd.runtime.followers import Followers

from .devices import NCCL_SETTINGS
from .drafts import OVER
from .job import Group, Options, store_secret
from .nodes import join, left, ranks_of, told_group
from .store import Place, Store

_RETURN_SECONDS = 2.0
"""After the first rank has ended: how long the others may take."""


def run_further_ranks(options: Options, place: Place) -> int:
    """Keep the ranks running until the first one ends; return 0, since that one says the reason."""
    store = None
    try:
        store = join(place, store_secret(options))
        group = told_group(place, store)
        if isinstance(group, Group):
            _follow(options, place, group, store)
    except (ConfigError, PeerError) as error:
        if store is not None:
            with suppress(PeerLostError):  # nobody is left to tell
                store.put("failure", {"users_mistake": isinstance(error, ConfigError), "line": str(error)})
    finally:
        with suppress(PeerLostError):
            if store is not None:
                store.put(left(place.rank), True)
    return 0


def _follow(options: Options, place: Place, group: Group, store: Store) -> None:
    """Keep the ranks running. Raises why one has failed."""
    os.environ.update(NCCL_SETTINGS)
    followers = Followers(tell)
    try:
        engine = group.config.engine_for(group.command)
        ranks = ranks_of(place.rank, place.size, engine.target_tensor_parallel_size)
        followers.prepare(engine, allowed_cores(), options.roles, ranks)
        if store.await_any(("ranks", *OVER), engine.startup_timeout_seconds) != "ranks":
            return
        followers.start(store.get("ranks", engine.startup_timeout_seconds))
        failure = followers.await_end()
        if failure is not None:
            raise failure
    finally:
        followers.stop(_RETURN_SECONDS)
