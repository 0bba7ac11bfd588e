"""A rank that follows its role's first one: a supervisor that outlives the computing process, and that process itself.

Which role that is stands in the configuration, which the supervisor does not know; its child tells it.
"""

from __future__ import annotations

import itertools
import os
import time
from contextlib import suppress

from amusd.child.fork_server import Channel, serve
from amusd.config import RunConfig
from amusd.errors import ConfigError, PeerLostError
from amusd.runtime.rank_layout import RoleRank, rank_layout
from amusd.runtime.succession import FIRST_INCARNATION, MAX_RESTARTS
from amusd.types import Role

from .child import in_words, killer_of, live, lives_of
from .devices import claim_hardware
from .draft_ranks import addresses
from .drafts import await_rendezvous
from .group import Group
from .job import Options, follower_role, read_group, store_secret
from .store import CONNECT_SECONDS, Place, Store, pid_of_rank
from .terminal import tell

_FAILED, _USERS_MISTAKE = 1, 2
_BACK_OFF_SECONDS = 0.5
"""Before another process where the last ones did not come as far as the store, times how many did not in a row."""


def supervise_follower(options: Options, place: Place) -> int:
    """Keep a computing process running for as long as its first rank may need one; return 0: the target's code counts.

    One of the target's that is killed is not replaced: the first rank notices, and has time to say so before torchrun
    would end it. One of the draft's is: the draft is lost, and the next one needs all its ranks. One that ends before
    it knows its role ends the start.
    """
    own: RoleRank | None = None
    num_unmet = 0
    lives = lives_of(options)
    for number in itertools.count(1):
        end = live(lives, number)
        killer = killer_of(end)
        if end.said:
            role, _, rank = end.said.partition(" ")
            own = RoleRank(Role(role), int(rank))
        if killer is not None:
            tell(f"{own or f'rank {place.rank}'} (pid {end.pid}) was killed by signal {killer}")
        if own is None or own.role is Role.TARGET:
            # one of the target's that fails by itself has said so
            if killer is not None or (own is None and end.code == _FAILED):
                with suppress(PeerLostError):  # nobody is left to tell
                    _report(Store(place, store_secret(options)), str(own or f"rank {place.rank}"), in_words(end))
            return 0
        if end.code not in (_FAILED, _USERS_MISTAKE) and killer is None:
            return 0
        num_unmet = 0 if end.said else num_unmet + 1
        if num_unmet > MAX_RESTARTS:
            tell(f"{own} ended {num_unmet} times before it could start; the target stays alone")
            return 0
        time.sleep(num_unmet * _BACK_OFF_SECONDS)
    raise AssertionError("there is always another life")


def run_follower_process(options: Options, place: Place) -> int:
    """Compute until the first rank ends; return the exit code. Raises what the rank raises, after it was reported."""
    return serve(lambda _: None, lambda channel, _orders, _prepared: _follow(options, place, channel))


def _follow(options: Options, place: Place, channel: Channel) -> int:
    store: Store | None = None
    if options.group_file is not None:  # before torch is imported
        group = read_group(options.group_file)
    else:
        store = Store(place, store_secret(options))
        text = store.get("group", CONNECT_SECONDS)
        if text is None:
            return 2
        group = Group.from_text(text)
    own = rank_layout(group.config.engine())[place.rank]
    config = claim_hardware(group.config, own.role, local_world_size=place.local_world_size, rank=own.rank)
    store = store or Store(place, store_secret(options))
    channel.say(f"{own.role.value} {own.rank}")
    if own.role is Role.TARGET:
        return _follow_target(options, group.command, config, own, store)
    with suppress(PeerLostError):  # the run is over, and the store with it
        for address in addresses(store, own.rank):
            follower_role(options.roles)(group.command, config, own, address)
    return 0


def _follow_target(options: Options, command: str, config: RunConfig, own: RoleRank, store: Store) -> int:
    store.put(pid_of_rank(own.rank), os.getpid())
    rendezvous = await_rendezvous(store, FIRST_INCARNATION, config.startup_timeout_seconds)
    if rendezvous is None:
        return 0  # the first rank ended before it was ready, and has said why
    assert rendezvous.ranks is not None, "the target has no other ranks"
    try:
        follower_role(options.roles)(command, config, own, rendezvous.ranks)
    except Exception as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        _report(store, str(own), line, users_mistake=isinstance(error, ConfigError))
        raise
    return 0


def _report(store: Store, who: str, line: str, *, users_mistake: bool = False) -> None:
    """To the target's first rank, which may not have met this one yet."""
    what = line if users_mistake else f"{who} failed: {line}"
    store.put("rank_failure", {"users_mistake": users_mistake, "line": what})
