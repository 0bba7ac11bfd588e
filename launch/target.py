"""The target's process: does the jobs, with a draft that it starts itself, or as rank 0 beside one that starts drafts.

As a rank it prepares the jobs for all. The target's other ranks are its children, and those of processes beside it.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path

from amusd.config import RunConfig
from amusd.console import tell, waiting_for
from amusd.errors import ConfigError, PeerError, PeerLostError
from amusd.files import keep_traceback
from amusd.runtime.cores import allowed_cores
from amusd.runtime.draft_restart import DraftSource
from amusd.runtime.supervisor import STOP_SECONDS
from amusd.types import Role

from .devices import claim_hardware, set_threads
from .drafts import ChildDrafts, StoreDrafts
from .job import Group, Options, prepare_group, store_secret
from .nodes import await_members, left, ranks_of, tell_no_group
from .scratch import is_left_over, tell_begin, tell_job_code
from .signals import PEER_FAILED, Interrupted, end_if_stopped, interrupt_main_thread, watching
from .store import CONNECT_SECONDS, LOOK_SECONDS, Place, Store

TargetWork = Callable[
    [str, Sequence[tuple[RunConfig, Path]], DraftSource],
    Generator["int | ConfigError", None, None],
]
_FAILURE_SECONDS = 1.0
"""After another process was found to be gone: how long its own reason may take to arrive."""

_LEAVE_SECONDS = 5.0
"""How long a target that serves the store waits at its end until the draft's machine needs it no more."""

_INTERRUPTED_SECONDS = 0.3
"""How long the others may take to end by themselves where a signal has ended the target, which has `GRACE_SECONDS`."""


def run_pair(options: Options) -> int:
    """Run the target here and the draft in a child; return the exit code: the first of the jobs' that is not 0.

    Raises `ConfigError` for the user's mistakes (the draft's included), `PeerFailedError` when the draft could not
    start, and what the target raises.
    """
    parent = os.getppid()
    group = prepare_group(options)
    directories = [] if group.command == "serve" else [job.run_directory for job in group.jobs]
    drafts = ChildDrafts(group.config.engine_for(group.command), directories, work=options.roles, tell_loss=tell)
    drafts.prepare()  # while torch is imported here
    _prepare_followers(options, group, drafts, allowed_cores())
    patience = STOP_SECONDS
    try:
        return _run(options, group.on(claim_hardware(group.config, Role.TARGET)), drafts, parent)
    except Interrupted:
        patience = _INTERRUPTED_SECONDS
        raise
    finally:
        _end_stopped(drafts)
        drafts.stop(patience)
        drafts.followers.stop(patience)


def run_target_rank(options: Options, place: Place) -> int:
    """The same as rank 0, with drafts that the last rank starts and further ranks that those between look after."""
    parent, cores = os.getppid(), allowed_cores()
    store = None
    try:
        group = prepare_group(options)
        ranks = ranks_of(place.rank, place.size, group.config.target_tensor_parallel_size)
        set_threads(group.config.hardware.num_threads)  # before there is torch
        store = Store(place, store_secret(options))
        tell(f"run directory: {group.jobs[0].run_directory}")
        _import_work(options)  # while the others come
        # torchrun has seen to it that the others run
        patience = CONNECT_SECONDS if place.is_by_itself else group.config.startup_timeout_seconds
        *_, draft = await_members(place, store, patience)
        group = group.on(claim_hardware(group.config, Role.TARGET, draft.num_gpus if place.apart else None))
    except ConfigError as error:
        if store is None and not place.is_by_itself:  # else the others wait for a target that has no mistake
            store = Store(place, store_secret(options))
        if store is not None:
            with suppress(PeerLostError):
                tell_no_group(store, str(error), 2)
                _await_leaving(place, store, _LEAVE_SECONDS)
        raise
    store.put("group", group.without_prompts().to_text())
    patience = _LEAVE_SECONDS
    drafts = StoreDrafts(store, tell_loss=tell, are_away=place.apart)
    _prepare_followers(options, group, drafts, cores, ranks[1:])
    try:
        _await_draft(place, drafts, group.config.startup_timeout_seconds)
        return _run(options, group, drafts, None if place.is_by_itself else parent)
    except Interrupted:
        patience = _INTERRUPTED_SECONDS
        raise
    finally:
        drafts.followers.stop(_INTERRUPTED_SECONDS)
        with suppress(PeerLostError):  # nobody is left to tell
            store.put("finished", True)
            _await_leaving(place, store, patience)
        if not place.apart:
            _end_stopped(drafts)
            with suppress(PeerLostError):
                drafts.go_on()


def _await_leaving(place: Place, store: Store, patience: float) -> None:
    """Our own store goes with this process: wait until the others need it no more. Raises `PeerLostError`."""
    deadline = time.monotonic() + patience
    for rank in range(1, place.size) if place.is_by_itself else ():
        store.await_any((left(rank),), max(0.0, deadline - time.monotonic()))


def _prepare_followers(
    options: Options,
    group: Group,
    drafts: ChildDrafts | StoreDrafts,
    cores: Sequence[int],
    ranks: Sequence[int] | None = None,
) -> None:
    """Have the target's other ranks, or those of them that this process looks after, load what they need."""
    drafts.followers.prepare(group.config.engine_for(group.command), cores, options.roles, ranks)


def _end_stopped(drafts: ChildDrafts | StoreDrafts) -> None:
    if (pid := drafts.pid) is not None and end_if_stopped(pid):
        tell(f"the draft worker (pid {pid}) was stopped, and ends with the run")


def _await_draft(place: Place, drafts: StoreDrafts, timeout: float) -> None:
    """Raises what the draft reports instead; `ConfigError` where none comes from another machine."""
    try:
        with waiting_for("the draft's process on its machine", timeout) if place.apart else nullcontext():
            drafts.await_first(timeout)
    except PeerLostError as error:
        if not place.apart:
            raise
        raise ConfigError(
            f"startup_timeout_seconds={timeout:g}: no draft came to {place.endpoint}; on its machine the same "
            "line is to run, with NODE_RANK=1"
        ) from error


@contextmanager
def _launcher_is_there(options: Options, group: Group, parent: int | None) -> Iterator[None]:
    """Say so and end if the process that has started this one, `parent`, or the command behind it has gone.

    None: this process does not end with its parent.
    """
    try:
        yield
    except (Interrupted, PeerLostError):
        if options.group_file is not None and is_left_over(options.group_file.parent):
            tell(f"the amusd command is gone, and its run with it; what was measured so far is in {group.folder}")
        elif parent in (None, os.getppid()):
            raise
        raise Interrupted(signal.SIGTERM) from None


def _run(options: Options, group: Group, drafts: ChildDrafts | StoreDrafts, parent: int | None) -> int:
    """Do the jobs, until the draft cannot start or another rank of the target fails: raises that."""
    with _launcher_is_there(options, group, parent):
        try:
            with watching(lambda: _failure(drafts) is not None, interrupt_main_thread, "others"):
                code = _do_jobs(options, group, drafts)
        except (Interrupted, PeerError) as error:
            if isinstance(error, Interrupted) and error.signum != PEER_FAILED:
                raise
            failure = _failure(drafts, _FAILURE_SECONDS)
            if failure is None or (isinstance(error, PeerError) and isinstance(failure, PeerLostError)):
                raise
            raise failure from None
        if code != 0 and (failure := drafts.start_failure()) is not None:
            raise failure
        return code


def _failure(drafts: ChildDrafts | StoreDrafts, timeout: float = 0.0) -> ConfigError | PeerError | None:
    """Why the target cannot go on; None without a reason, after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while (found := drafts.followers.failure() or drafts.start_failure()) is None and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    return found


def _import_work(options: Options) -> TargetWork:
    work: TargetWork = importlib.import_module(options.roles or "amusd.commands.run").run_target
    return work


def _do_jobs(options: Options, group: Group, drafts: ChildDrafts | StoreDrafts) -> int:
    """One job after another, until one fails other than by its user's mistake: the pair is spent then."""
    runs = [(job.config, job.run_directory) for job in group.jobs]
    first_code = 0
    with closing(_import_work(options)(group.command, runs, drafts)) as endings:
        for job in group.jobs:
            tell_begin(options.outcome_file)
            drafts.record(job.run_directory)
            if job.title:
                tell(job.title)
            try:
                ending = next(endings)
            except Exception as error:
                if not isinstance(error, ConfigError):
                    keep_traceback(job.run_directory, Role.TARGET.value, error)
                raise
            if isinstance(ending, ConfigError):
                tell(str(ending))
                ending = 2
            tell_job_code(options.outcome_file, ending)
            first_code = first_code or ending
            if ending not in (0, 2):
                break
    return first_code
