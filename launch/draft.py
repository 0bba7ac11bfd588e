"""The last rank: a supervisor that starts drafting processes, the next where one is lost, and such a process itself.

Such a process decides for all ranks of the draft, if there are several, and is the only one that talks to the target.

The supervisor knows neither torch nor the target. A process that finds no run to draft for ends with 0, so whoever is
started in vain ends the succession by itself; the target says which one it wants (`drafts.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from amusd.config import RunConfig
from amusd.errors import ConfigError, PeerLostError, RankLostError
from amusd.runtime.succession import FIRST_INCARNATION, MAX_RESTARTS
from amusd.transport.base import Rendezvous
from amusd.types import Role

from .child import Ended, run_child, say
from .devices import claim_hardware
from .draft_ranks import gather_ranks, tell_ranks
from .drafts import await_rendezvous
from .group import Group
from .job import Options, draft_role, own_transport, prepare_group, store_secret
from .lifetime import Interrupted, interrupt_main_thread
from .store import CONNECT_SECONDS, Place, Store
from .terminal import tell

_RETURN_SECONDS = 2.0
"""After the target has finished: how long the draft may take to notice by itself."""
_FAILED, _USERS_MISTAKE, _DISMISSED = 1, 2, 3
"""Exit codes of a drafting process that another one may follow."""
_MET, _REPORTED = "met", "reported"
"""What such a process says to this one: the target has told it where to connect; it has told the target why it ends."""
_BACK_OFF_SECONDS = 0.5
"""Before another process where the last one did not come as far as the target, times how many did not in a row."""


def supervise_draft(options: Options, place: Place) -> int:
    """Keep a drafting process running until there is nothing to draft.

    Returns 0, since the target's code is the run's; on a machine without the target, the code of a draft that could
    not start. A draft that is killed must not make torchrun end the target, which goes on alone until the next one is
    there. The target counts those that come to nothing; here only those that never came as far as the target.
    """
    num_unmet = 0
    for incarnation in itertools.count(FIRST_INCARNATION):
        child = run_child(options, incarnation)
        code, has_met = child.code, child.said.startswith(_MET)
        if child.killed_by is not None:
            tell(f"the draft worker (rank {place.rank}, pid {child.pid}) was killed by signal {child.killed_by}")
        is_lost = code in (_FAILED, _USERS_MISTAKE, _DISMISSED) or child.killed_by is not None
        # What is wrong with the very first one ends the run, unless it had begun to draft.
        if not is_lost or (incarnation == FIRST_INCARNATION and (code == _USERS_MISTAKE or not has_met)):
            if is_lost and code != _USERS_MISTAKE and not child.said and not place.is_away:
                _report(options, place, child)
            break
        num_unmet = 0 if has_met else num_unmet + 1
        if num_unmet > MAX_RESTARTS:
            tell(f"the draft worker ended {num_unmet} times before it could start; the target stays alone")
            break
        time.sleep(num_unmet * _BACK_OFF_SECONDS)
    return code if place.is_away and code in (_FAILED, _USERS_MISTAKE) else 0


def _report(options: Options, place: Place, child: Ended) -> None:
    """Tell the target of a first process that ended before it had said anything."""
    with suppress(PeerLostError):  # nobody is left to tell
        failure = {"users_mistake": False, "line": child.end}
        Store(place, store_secret(options)).put("draft_failure", failure)


def run_draft_process(options: Options, place: Place) -> int:
    """Draft until the target has finished; return the exit code. Raises what the draft raises, after reporting it."""
    if options.group_file is not None:  # before torch is imported
        group = prepare_group(options)
        config = claim_hardware(group.config, Role.DRAFT, local_world_size=place.local_world_size)
        store = Store(place, store_secret(options))
        store.get("group", config.startup_timeout_seconds)
    else:
        transport = own_transport(options)
        store = Store(place, store_secret(options))
        try:
            text = store.get("group", CONNECT_SECONDS)
        except ConfigError as error:  # the target, which waits, finds the seal of this as wrong as its own was here
            store.put("draft_failure", {"users_mistake": True, "line": str(error)})
            raise
        if text is None:
            return 2
        group = Group.from_text(text)
        # how it connects, and with which keys, a worker decides by itself, whatever it is told
        config = dataclasses.replace(group.config, transport=transport)
        config = claim_hardware(config, Role.DRAFT, local_world_size=place.local_world_size)
    if store.has("finished"):
        return 0
    directories = [job.run_directory for job in group.jobs]
    return _draft_until_finished(options, config, directories, store)


def _announce(config: RunConfig, incarnation: int, store: Store) -> None:
    """Tell the target of this process, and of the draft's other ranks once they have heard of it."""
    others = gather_ranks(store, incarnation, config.draft_tensor_parallel_size, config.startup_timeout_seconds)
    if others is None:
        raise Interrupted(signal.SIGTERM)  # the target has ended, and has said why
    store.put("draft", {"incarnation": incarnation, "pids": [os.getpid(), *others]})


def _draft_until_finished(options: Options, config: RunConfig, directories: Sequence[Path], store: Store) -> int:
    incarnation = options.incarnation or FIRST_INCARNATION
    returned = threading.Event()
    met = threading.Event()

    def end_soon() -> None:
        if not returned.wait(_RETURN_SECONDS):
            interrupt_main_thread()

    def meet(ranks: str | None) -> Rendezvous:
        if ranks is not None:
            tell_ranks(store, incarnation, ranks)
        rendezvous = await_rendezvous(store, incarnation, config.startup_timeout_seconds)
        if rendezvous is None:
            raise Interrupted(signal.SIGTERM)  # the target ended before it was ready, and has said why
        met.set()
        say(options, _MET)
        return rendezvous

    if not directories[0].is_dir():  # another machine may not have it
        directories = ()
    try:
        with store.watching("finished", end_soon):
            _announce(config, incarnation, store)
            code = draft_role(options.roles)(config, directories, meet, incarnation)
    except Exception as error:
        users_mistake = isinstance(error, ConfigError)
        if incarnation > FIRST_INCARNATION:
            if store.has("finished"):  # it was on its way to a target that needs it no more
                return 0
        elif users_mistake or not met.is_set():  # once they have met, the link itself tells the target
            store.put("draft_failure", {"users_mistake": users_mistake, "line": f"{error}" or type(error).__name__})
            say(options, _REPORTED)
        if not isinstance(error, RankLostError):
            raise
        tell(f"the draft worker (pid {os.getpid()}) ends: {error}")
        return _FAILED
    finally:
        returned.set()
    with suppress(PeerLostError):  # the target has gone, and the store with it
        return _DISMISSED if store.has(f"dismissed/{incarnation}") else code
    return code
