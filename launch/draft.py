"""The last rank, under torchrun or on another machine: starts drafts as a target's process would (`DraftProcess`).

It is told by the target through the store (`drafts.py`) when the next one is wanted, and where that connects; a draft's
process itself knows nothing of the store.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from amusd.config import DrafterConfig, RunConfig
from amusd.console import tell, waiting_for
from amusd.errors import ConfigError, PeerError, PeerLostError
from amusd.runtime.draft_process import TARGET_GONE, DraftProcess
from amusd.runtime.draft_restart import FIRST_INCARNATION
from amusd.types import Role

from .devices import NCCL_SETTINGS, claim_hardware
from .drafts import BOTH_LOADED, ChildDrafts, await_rendezvous, pid_of
from .job import Group, Options, store_secret
from .nodes import join, left, own_transport, told_group
from .store import LOOK_SECONDS, Place, Store

_RETURN_SECONDS = 2.0
"""After the target has finished: how long the draft may take to notice by itself."""


def run_draft_rank(options: Options, place: Place) -> int:
    """Keep a draft running until the target wants none any more; return the exit code.

    The target's code is the run's, so here it is 0. On a machine without the target it is 2 where the target found a
    mistake, and what ended the draft is raised.
    """
    os.environ.update(NCCL_SETTINGS)  # before there is a child that may need them
    store = None
    try:
        with ExitStack() as stack:
            store = join(place, store_secret(options))
            group = told_group(place, store)
            if isinstance(group, int):
                return group
            drafts = stack.enter_context(_drafts(options, group))
            _draft(place, store, group.config, drafts)
    except (ConfigError, PeerError) as error:
        failure = {"users_mistake": isinstance(error, ConfigError), "line": str(error)}
        with suppress(PeerLostError):  # nobody is left to tell
            if store is not None:
                store.put("failure", failure)
        if place.is_away:
            raise
        return 0
    finally:
        with suppress(PeerLostError):
            if store is not None:
                store.put(left(place.rank), True)
    if place.is_away:
        tell("the target has finished, and so has this draft")
    return 0


@contextmanager
def _drafts(options: Options, group: Group) -> Iterator[DraftProcess]:
    """The first draft loads meanwhile, and the last one has ended when this is left. Raises `ConfigError`."""
    # whatever it is told: a worker decides by itself how it connects, with which keys, and which code it runs
    config = dataclasses.replace(group.config, transport=own_transport(options))
    config = claim_hardware(config, Role.DRAFT)
    engine = config.engine_for(group.command)
    drafts = ChildDrafts(
        dataclasses.replace(engine, drafters=own_code(options, engine.drafters)),
        group.events if group.jobs[0].run_directory.is_dir() else None,  # another machine may not have it
        work=options.roles,
        tell_loss=tell,
    )
    try:
        drafts.prepare()
        yield drafts
    finally:
        drafts.stop()


def own_code(options: Options, drafters: Sequence[DrafterConfig]) -> tuple[DrafterConfig, ...]:
    """The drafters that the target asks for, with this worker's own word on code that would run here.

    Raises `ConfigError` for a factory that this worker's own arguments do not name.
    """
    from .compose import compose_config

    if all(drafter.factory is None for drafter in drafters):
        return tuple(drafters)
    own = {drafter.factory: drafter.options for drafter in compose_config(options.overrides).engine().drafters}
    for drafter in drafters:
        if drafter.factory not in (None, *own):
            raise ConfigError(
                f"drafter.factory={drafter.factory}: the target asks for it, and it would run code on this machine; "
                f"start the draft with drafter.factory={drafter.factory}, too"
            )
    return tuple(
        drafter if drafter.factory is None else dataclasses.replace(drafter, options=own[drafter.factory])
        for drafter in drafters
    )


def _draft(place: Place, store: Store, config: RunConfig, drafts: DraftProcess) -> None:
    """Start one draft after another, as the target wants them. Raises why none can start."""
    for incarnation in itertools.count(FIRST_INCARNATION):
        drafts.prepare()
        store.put("draft", {"incarnation": incarnation, "pid": drafts.pid, "supervisor": os.getpid()})
        rendezvous = await_rendezvous(store, incarnation, config.startup_timeout_seconds)
        if rendezvous is None:
            return
        drafts.tell(incarnation, rendezvous)
        with ExitStack() as wait:
            if place.is_away and incarnation == FIRST_INCARNATION:
                wait.enter_context(waiting_for(BOTH_LOADED))
            if _await_end(store, incarnation, drafts, wait):
                return
        failure = drafts.start_failure()
        if failure is not None:
            raise failure


def _await_end(store: Store, incarnation: int, drafts: DraftProcess, wait: ExitStack) -> bool:
    """Wait for the end of a draft, telling the target of it and it of the target; whether the run is over, too.

    `wait` is closed when the target has met the draft.
    """
    finished, dismissed, met = "finished", f"dismissed/{incarnation}", f"met/{incarnation}"
    is_pid_told = has_met = False
    while True:
        has_ended = drafts.ending(LOOK_SECONDS) is not None
        if not is_pid_told and not drafts.is_preparing:
            is_pid_told = True
            store.put(pid_of(incarnation), drafts.pid)
        if not has_met and store.has(met):
            has_met = True
            drafts.met()
            wait.close()
        if store.has(finished):
            drafts.ending(_RETURN_SECONDS)
            return drafts.start_failure() is None  # a mistake of both ends is said on both
        if has_ended:
            break
        if store.has(dismissed):
            drafts.dismiss()
    if drafts.exit_code == TARGET_GONE:
        with suppress(PeerLostError):  # it has not gone: it wants another draft
            return store.await_any((finished, dismissed), _RETURN_SECONDS) == finished
    return drafts.exit_code == 0
