"""Rank 0: prepares the job for both ranks, runs the target, and hears of a draft that cannot start."""

from __future__ import annotations

import dataclasses
import os
from contextlib import suppress
from typing import Any

from amusd.errors import ConfigError, PeerError, PeerFailedError, PeerLostError
from amusd.transport.base import Rendezvous
from amusd.types import Role

from .devices import claim_hardware
from .job import Job, Options, target_role
from .lifetime import PEER_FAILED, Interrupted, interrupt_main_thread
from .run_directory import write_workers
from .store import Place, Store
from .terminal import tell

_FAILURE_SECONDS = 1.0
"""After the link broke: how long the draft's own reason may take to arrive."""


def run_target_process(options: Options, place: Place) -> int:
    """Run the target to its end; return its exit code.

    Raises `ConfigError` for the user's mistakes (the draft's included), `PeerFailedError` when the draft could not
    start, and what the target raises.
    """
    try:
        job = Job.prepare(options)
    except ConfigError:
        Store(place).put("job", None)  # the draft waits for it
        raise
    if options.run_directory is None:
        tell(f"run directory: {job.run_directory}")
    config = claim_hardware(job.config, Role.TARGET, local_world_size=place.local_world_size)
    store = Store(place)
    store.put("job", job.to_text())
    draft_pid = store.get("draft_pid", config.startup_timeout_seconds)
    write_workers(job.run_directory, target=os.getpid(), draft=draft_pid)
    try:
        return _run_beside_draft(options, dataclasses.replace(job, config=config), store)
    finally:
        with suppress(PeerLostError):  # nobody is left to tell
            if not store.has("rendezvous"):
                store.put("rendezvous", None)
            store.put("finished", True)


def _run_beside_draft(options: Options, job: Job, store: Store) -> int:
    def publish(rendezvous: Rendezvous) -> None:
        store.put("rendezvous", dataclasses.asdict(rendezvous))

    try:
        with store.watching("draft_failure", interrupt_main_thread):
            code = target_role(options.roles)(job.command, job.config, job.run_directory, publish)
    except Interrupted as interruption:
        if interruption.signum != PEER_FAILED:
            raise
        _raise_failure_of_draft(store)
        raise PeerLostError("the other worker's machine is gone") from None
    except PeerError:
        _raise_failure_of_draft(store)
        raise
    if code != 0 and store.has("draft_failure"):
        _raise_failure_of_draft(store)
    return code


def _raise_failure_of_draft(store: Store) -> None:
    """Raise what the draft reported, if it did: its `ConfigError` as ours, anything else as `PeerFailedError`."""
    try:
        failure: dict[str, Any] = store.get("draft_failure", _FAILURE_SECONDS)
    except PeerLostError:
        return
    if failure["users_mistake"]:
        raise ConfigError(failure["line"]) from None
    raise PeerFailedError(f"the draft worker could not start: {failure['line']}") from None
