"""Rank 1: a supervisor that outlives the drafting process, and that process itself."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from amusd.config import RunConfig
from amusd.errors import ConfigError
from amusd.transport.base import Rendezvous
from amusd.types import Role

from .devices import claim_hardware
from .group import Group
from .job import Options, draft_role, own_transport, prepare_group, store_secret
from .lifetime import Interrupted, interrupt_main_thread
from .store import CONNECT_SECONDS, Place, Store
from .terminal import tell

_RETURN_SECONDS = 2.0
"""After the target has finished: how long the draft may take to notice by itself."""
_ASKED_TO_END = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM})


def supervise_draft(options: Options, place: Place) -> int:
    """Start the drafting process and stay until it ends; return 0: the target's code is the run's.

    A draft that is killed must not make torchrun end the target, which goes on alone.
    """
    arguments = dataclasses.replace(options, incarnation=1).arguments()
    child = subprocess.Popen([sys.executable, str(Path(__file__).with_name("run.py")), *arguments])
    code = child.wait()
    if code < 0 and -code not in _ASKED_TO_END:
        tell(f"the draft worker (rank {place.rank}, pid {child.pid}) was killed by signal {-code}")
    return 0


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
        text = store.get("group", CONNECT_SECONDS)
        if text is None:
            return 2
        group = Group.from_text(text)
        # how it connects, and with which keys, a worker decides by itself, whatever it is told
        config = dataclasses.replace(group.config, transport=transport)
        config = claim_hardware(config, Role.DRAFT, local_world_size=place.local_world_size)
    if store.has("finished"):
        return 0
    store.put("draft_pid", os.getpid())
    directories = [job.run_directory for job in group.jobs]
    return _draft_until_finished(options, config, directories, store)


def _draft_until_finished(options: Options, config: RunConfig, directories: Sequence[Path], store: Store) -> int:
    returned = threading.Event()
    met = threading.Event()

    def end_soon() -> None:
        if not returned.wait(_RETURN_SECONDS):
            interrupt_main_thread()

    def await_rendezvous() -> Rendezvous:
        values = store.get("rendezvous", config.startup_timeout_seconds)
        if values is None:
            raise Interrupted(signal.SIGTERM)  # the target ended before it was ready, and has said why
        met.set()
        return Rendezvous(**values)

    if not directories[0].is_dir():  # another machine may not have it
        directories = ()
    try:
        with store.watching("finished", end_soon):
            return draft_role(options.roles)(config, directories, await_rendezvous, options.incarnation or 1)
    except Exception as error:
        users_mistake = isinstance(error, ConfigError)
        if users_mistake or not met.is_set():  # once they have met, the link itself tells the target
            store.put("draft_failure", {"users_mistake": users_mistake, "line": f"{error}" or type(error).__name__})
        raise
    finally:
        returned.set()
