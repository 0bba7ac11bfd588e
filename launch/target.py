"""The target's process: does the jobs, with a draft that it starts itself, or beside other ranks under torchrun.

As a rank it prepares the jobs for all others, and hears of those that cannot start.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import Any

from amusd.config import HardwareConfig, RunConfig
from amusd.errors import ConfigError, PeerError, PeerFailedError, PeerLostError
from amusd.files import keep_traceback
from amusd.runtime.supervisor import STOP_SECONDS
from amusd.types import Role

from .devices import claim_hardware
from .drafts import ChildDrafts, StoreDrafts
from .group import Group
from .job import Options, prepare_group, store_secret, target_role
from .scratch import is_left_over, tell_begin, tell_job_code
from .signals import PEER_FAILED, Interrupted, end_if_stopped, interrupt_main_thread, watching
from .store import Place, Store, pid_of_rank
from .terminal import tell, waiting_for

_FAILURE_SECONDS = 1.0
"""After the link broke: how long the draft's own reason may take to arrive."""

_INTERRUPTED_SECONDS = 0.3
"""How long the draft may take to end by itself where a signal has ended the target, which has `GRACE_SECONDS`."""


def run_pair(options: Options) -> int:
    """Run the target here and the draft in a child; return the exit code: the first of the jobs' that is not 0.

    Raises `ConfigError` for the user's mistakes (the draft's included), `PeerFailedError` when the draft could not
    start, and what the target raises.
    """
    parent = os.getppid()
    group = prepare_group(options)
    directories = [job.run_directory for job in group.jobs]
    drafts = ChildDrafts(group.config.engine_for(group.command), directories, work=options.roles, tell_loss=tell)
    drafts.prepare()  # while torch is imported here
    patience = STOP_SECONDS
    try:
        hardware = claim_hardware(group.config, Role.TARGET, local_world_size=group.config.engine().num_ranks).hardware
        with _launcher_is_there(options, group, parent):
            return _run_beside_child(options, group.on(hardware), drafts)
    except Interrupted:
        patience = _INTERRUPTED_SECONDS
        raise
    finally:
        pid = drafts.pid
        if pid is not None and end_if_stopped(pid):
            tell(f"the draft worker (pid {pid}) was stopped, and ends with the run")
        drafts.stop(patience)


def _run_beside_child(options: Options, group: Group, drafts: ChildDrafts) -> int:
    try:
        with watching(lambda: drafts.start_failure() is not None, interrupt_main_thread, "draft"):
            return _do_jobs(options, group, drafts)
    except (Interrupted, PeerError) as error:
        failure = drafts.start_failure()
        if failure is None or (isinstance(error, Interrupted) and error.signum != PEER_FAILED):
            raise
        raise failure from None


def run_target_rank(options: Options, place: Place) -> int:
    """The same as rank 0, which all other ranks serve."""
    agent = os.getppid()
    try:
        group = prepare_group(options)
        place.check_fits(group.config)
        hardware = claim_hardware(group.config, Role.TARGET, local_world_size=place.local_world_size).hardware
    except ConfigError:
        store = Store(place, store_secret(options))
        for name, value in (("group", None), ("finished", True)):  # the other ranks wait for one of them
            store.put(name, value)
        raise
    if options.group_file is None:
        tell(f"run directory: {group.jobs[0].run_directory}")
    with _launcher_is_there(options, group, agent):
        return _run(options, place, group, hardware)


@contextmanager
def _launcher_is_there(options: Options, group: Group, parent: int) -> Iterator[None]:
    """Where the process that has started this one, `parent`, or the command behind it has gone: say so, and end."""
    try:
        yield
    except (Interrupted, PeerLostError):
        if options.group_file is not None and is_left_over(options.group_file.parent):
            tell(f"the amusd command is gone, and its run with it; what was measured so far is in {group.folder}")
        elif os.getppid() == parent:
            raise
        raise Interrupted(signal.SIGTERM) from None


def _run(options: Options, place: Place, group: Group, hardware: HardwareConfig) -> int:
    store = Store(place, store_secret(options))
    store.put("group", group.without_prompts().to_text())
    draft_pids = _await_draft(place, store, group.config.startup_timeout_seconds)
    are_away = place.local_world_size < place.world_size
    drafts = StoreDrafts(store, pids=draft_pids, target_pids=[os.getpid()], are_away=are_away)
    try:
        drafts.target_pids = _target_pids(group.config, store)
        return _run_beside_others(options, group.on(hardware), drafts, store)
    finally:
        with suppress(PeerLostError):  # nobody is left to tell
            store.put("finished", True)
        if place.local_world_size == place.world_size:
            for pid in filter(end_if_stopped, drafts.pids):
                tell(f"the draft worker (pid {pid}) was stopped, and ends with the run")
            with suppress(PeerLostError):
                drafts.go_on()


def _await_draft(place: Place, store: Store, timeout: float) -> list[int]:
    """Process ids of the first draft's ranks, once all have started.

    Raises what one of them reports instead; `ConfigError` when none comes from another machine, `PeerLostError` from
    this one.
    """
    is_away = place.local_world_size < place.world_size
    try:
        with waiting_for("the draft's process on its machine", timeout) if is_away else nullcontext():
            found = store.await_any(("draft", "draft_failure", "rank_failure"), timeout)
            if found == "draft_failure":
                _raise_failure_of_draft(store)
            _raise_failure_of_rank(store)
    except PeerLostError as error:
        if not is_away:
            raise
        raise ConfigError(
            f"startup_timeout_seconds={timeout:g}: no draft came to {place.address}:{place.port}; on its machine the "
            "same line is to run, with NODE_RANK=1"
        ) from error
    pids: list[int] = store.get("draft", _FAILURE_SECONDS)["pids"]
    return pids


def _target_pids(config: RunConfig, store: Store) -> list[int]:
    """Process ids of the target's ranks, once all have started. Raises what one of them reports instead."""
    pids = [os.getpid()]
    for name in map(pid_of_rank, range(1, config.target_tensor_parallel_size)):
        store.await_any((name, "rank_failure"), config.startup_timeout_seconds)
        _raise_failure_of_rank(store)
        pids.append(store.get(name, _FAILURE_SECONDS))
    return pids


def _run_beside_others(options: Options, group: Group, drafts: StoreDrafts, store: Store) -> int:
    try:
        with (
            store.watching("draft_failure", interrupt_main_thread),
            store.watching("rank_failure", interrupt_main_thread),
        ):
            code = _do_jobs(options, group, drafts)
    except Interrupted as interruption:
        if interruption.signum != PEER_FAILED:
            raise
        _raise_failure_of_rank(store)
        _raise_failure_of_draft(store)
        raise PeerLostError("the other worker's machine is gone") from None
    except PeerError:
        _raise_failure_of_rank(store)
        _raise_failure_of_draft(store)
        raise
    if code != 0 and store.has("draft_failure"):
        _raise_failure_of_draft(store)
    return code


def _do_jobs(options: Options, group: Group, drafts: ChildDrafts | StoreDrafts) -> int:
    """One job after another, until one fails other than by its user's mistake: the pair is spent then."""
    runs = [(job.config, job.run_directory) for job in group.jobs]
    first_code = 0
    with closing(target_role(options.roles)(group.command, runs, drafts)) as endings:
        for number, job in enumerate(group.jobs):
            tell_begin(options.outcome_file)
            drafts.record(job.run_directory)
            if group.standing is not None:
                tell(group.standing.line(job.title, number, time.monotonic()))
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


def _raise_failure_of_rank(store: Store) -> None:
    """Raise what another rank of the target reported, if one did."""
    if store.has("rank_failure"):
        failure: dict[str, Any] = store.get("rank_failure", _FAILURE_SECONDS)
        raise (ConfigError if failure["users_mistake"] else PeerFailedError)(failure["line"]) from None


def _raise_failure_of_draft(store: Store) -> None:
    """Raise what the draft reported, if it did: its `ConfigError` as ours, anything else as `PeerFailedError`."""
    try:
        failure: dict[str, Any] = store.get("draft_failure", _FAILURE_SECONDS)
    except PeerLostError:
        return
    if failure["users_mistake"]:
        raise ConfigError(failure["line"]) from None
    raise PeerFailedError(failure["line"]) from None
