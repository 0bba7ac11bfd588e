"""A rank of the target beyond the first: a supervisor that outlives the computing process, and that process itself."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from amusd.errors import ConfigError, PeerLostError
from amusd.runtime.succession import FIRST_INCARNATION
from amusd.types import Role

from .devices import claim_hardware
from .draft import ASKED_TO_END
from .drafts import await_rendezvous
from .group import Group
from .job import Options, follower_role, prepare_group, store_secret
from .store import CONNECT_SECONDS, Place, Store, pid_of_rank
from .terminal import tell


def supervise_follower(options: Options, place: Place) -> int:
    """Start the computing process and stay until it ends; return 0: the target's code is the run's.

    When it is killed, the first rank notices, and has time to say so before torchrun would end it.
    """
    arguments = dataclasses.replace(options, incarnation=1).arguments()
    child = subprocess.Popen([sys.executable, str(Path(__file__).with_name("run.py")), *arguments])
    code = child.wait()
    if code < 0 and -code not in ASKED_TO_END:
        tell(f"rank {place.rank} of the target (pid {child.pid}) was killed by signal {-code}")
        with suppress(PeerLostError):  # nobody is left to tell
            _report(Store(place, store_secret(options)), place, f"killed by signal {-code}", users_mistake=False)
    return 0


def run_follower_process(options: Options, place: Place) -> int:
    """Compute until the first rank ends; return the exit code. Raises what the rank raises, after it was reported."""
    store: Store | None = None
    if options.group_file is not None:  # before torch is imported
        group = prepare_group(options)
    else:
        store = Store(place, store_secret(options))
        text = store.get("group", CONNECT_SECONDS)
        if text is None:
            return 2
        group = Group.from_text(text)
    config = claim_hardware(group.config, Role.TARGET, local_world_size=place.local_world_size, rank=place.rank)
    store = store or Store(place, store_secret(options))
    store.put(pid_of_rank(place.rank), os.getpid())
    rendezvous = await_rendezvous(store, FIRST_INCARNATION, config.startup_timeout_seconds)
    if rendezvous is None:
        return 0  # the first rank ended before it was ready, and has said why
    try:
        follower_role(options.roles)(group.command, config, place.rank, rendezvous)
    except Exception as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        _report(store, place, line, users_mistake=isinstance(error, ConfigError))
        raise
    return 0


def _report(store: Store, place: Place, line: str, *, users_mistake: bool) -> None:
    """To the first rank, which may not have met this one yet."""
    what = line if users_mistake else f"rank {place.rank} of the target failed: {line}"
    store.put("rank_failure", {"users_mistake": users_mistake, "line": what})
