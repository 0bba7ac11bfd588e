"""The last rank: a supervisor that starts drafting processes, the next where one is lost, and such a process itself.

Such a process decides for all ranks of the draft, if there are several, and is the only one that talks to the target.
Where it can be, it is forked from one that has loaded the draft once (`amusd.child`).

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amusd.child.fork_server import Channel, Orders, serve
from amusd.config import RunConfig
from amusd.errors import ConfigError, PeerLostError, RankLostError
from amusd.runtime.succession import FIRST_INCARNATION, MAX_RESTARTS
from amusd.transport.base import Rendezvous
from amusd.types import Role

from .child import in_words, killer_of, live, lives_of
from .devices import claim_hardware
from .draft_ranks import gather_ranks, tell_ranks
from .drafts import BOTH_LOADED, await_rendezvous
from .group import Group
from .job import Options, draft_role, own_transport, prepare_draft, read_group, store_secret
from .lifetime import PEER_FAILED, Interrupted, exit_code_of, interrupt_main_thread
from .store import CONNECT_SECONDS, Place, Store
from .terminal import tell, waiting_for

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
    num_unmet, is_first = 0, True
    lives = lives_of(options)
    for incarnation in itertools.count(FIRST_INCARNATION):
        end = live(lives, incarnation, is_first=is_first)
        code, killer, has_met = end.code, killer_of(end), end.said.startswith(_MET)
        if killer is not None:
            tell(f"the draft worker (rank {place.rank}, pid {end.pid}) was killed by signal {killer}")
        is_lost = code in (_FAILED, _USERS_MISTAKE, _DISMISSED) or killer is not None
        # A failure of the first one ends the run, unless it had begun to draft. One that is killed is no failure.
        if not is_lost or (is_first and killer is None and (code == _USERS_MISTAKE or not has_met)):
            # On another machine one that failed by itself has reported it, or has not found the store.
            is_known = end.said or code == _USERS_MISTAKE or place.is_away
            if is_lost and not is_known:
                _report(options, place, in_words(end))
            break
        num_unmet = 0 if has_met else num_unmet + 1
        is_first = is_first and not has_met
        if num_unmet > MAX_RESTARTS:
            if is_first:
                _report(options, place, f"{in_words(end)}, as {MAX_RESTARTS} before it")
            else:
                tell(f"the draft worker ended {num_unmet} times before it could start; the target stays alone")
            break
        time.sleep(num_unmet * _BACK_OFF_SECONDS)
    lives.close()
    if place.is_away and not is_lost:
        tell("the target has finished, and so has this draft")
    return code if place.is_away and code in (_FAILED, _USERS_MISTAKE) else 0


def _report(options: Options, place: Place, line: str) -> None:
    """Tell the target of a first process that ended before it had said anything."""
    with suppress(PeerLostError):  # nobody is left to tell
        failure = {"users_mistake": False, "line": line}
        Store(place, store_secret(options)).put("draft_failure", failure)


def run_draft_process(options: Options, place: Place) -> int:
    """Draft until the target has finished, or fork the processes that do; return the exit code.

    Raises what the draft raises, after reporting it.
    """
    joined = _join(options, place)
    if joined is None:
        return 2
    config, directories = joined

    def prepare(orders: Orders) -> Any:
        return _prepare(options, place, config, orders)

    def draft(channel: Channel, _settings: Orders, orders: Orders, drafters: Any) -> int:
        channel.on_hang_up(lambda: os.kill(os.getpid(), signal.SIGTERM))
        life = _Life(options, place, config, directories, orders, channel, drafters)
        return exit_code_of(life.run)

    return serve(prepare, draft)


def _join(options: Options, place: Place) -> tuple[RunConfig, list[Path]] | None:
    """What is to be done, with the hardware of this process, and where; None when there is nothing.

    Raises `ConfigError`, after the target was told.
    """
    if options.group_file is not None:  # before torch is imported
        group = read_group(options.group_file)
        config = claim_hardware(group.config, Role.DRAFT, local_world_size=place.local_world_size)
        if Store(place, store_secret(options)).get("group", config.startup_timeout_seconds) is None:
            return None
    else:
        transport = own_transport(options)
        store = Store(place, store_secret(options))
        try:
            with waiting_for("the target's job", CONNECT_SECONDS) if place.is_away else nullcontext():
                text = store.get("group", CONNECT_SECONDS)
            if text is None:
                if place.is_away:
                    tell("the target found a mistake in its own line, and says there which")
                return None
            group = Group.from_text(text)
            # how it connects, and with which keys, a worker decides by itself, whatever it is told
            config = dataclasses.replace(group.config, transport=transport)
            config = claim_hardware(config, Role.DRAFT, local_world_size=place.local_world_size)
        except ConfigError as error:  # where it is a wrong seal, the target finds that of this wrong as well
            store.put("draft_failure", {"users_mistake": True, "line": str(error)})
            raise
    directories = [job.run_directory for job in group.jobs]
    return config, directories if directories[0].is_dir() else []  # another machine may not have them


def _prepare(options: Options, place: Place, config: RunConfig, orders: Orders) -> Any:
    """Load what each life of the draft can be forked with; None where nothing can. Leaves no thread and no socket."""
    store = Store(place, store_secret(options))
    if orders["is_first"] and config.draft_tensor_parallel_size == 1:
        _announce(config, orders["incarnation"], store)  # of what comes: the target can load meanwhile
    with store.watching("finished", interrupt_main_thread):
        return prepare_draft(options.roles, config)


def _announce(config: RunConfig, incarnation: int, store: Store) -> None:
    """Tell the target of this process, and of the draft's other ranks once they have heard of it."""
    others = gather_ranks(store, incarnation, config.draft_tensor_parallel_size, config.startup_timeout_seconds)
    if others is None:
        raise Interrupted(PEER_FAILED)  # the target has ended, and has said why
    store.put("draft", {"incarnation": incarnation, "pids": [os.getpid(), *others]})


@dataclass(frozen=True)
class _Life:
    """One life of the draft."""

    options: Options
    place: Place
    config: RunConfig
    directories: Sequence[Path]
    orders: Orders
    """Its incarnation, and whether it is the first that is to meet the target."""
    channel: Channel
    """To the supervisor."""
    drafters: Any
    """As `_prepare` has left them."""

    @property
    def incarnation(self) -> int:
        """Its number."""
        return int(self.orders["incarnation"])

    def run(self) -> int:
        """Draft until the target has finished; return the exit code. Raises what the draft raises."""
        store = Store(self.place, store_secret(self.options))
        if store.has("finished"):
            return 0
        returned, met = threading.Event(), threading.Event()

        def end_soon() -> None:
            if not returned.wait(_RETURN_SECONDS):
                interrupt_main_thread()

        def meet(ranks: str | None) -> Rendezvous:
            tell_wait()
            rendezvous = self._await_rendezvous(store, ranks)
            met.set()
            self.channel.say(_MET)
            return rendezvous

        try:
            with store.watching("finished", end_soon), self._wait(store) as tell_wait:
                try:
                    _announce(self.config, self.incarnation, store)
                    role = draft_role(self.options.roles)
                    code = role(self.config.engine(), self.directories, meet, self.incarnation, self.drafters)
                finally:
                    returned.set()
        except Exception as error:
            users_mistake = isinstance(error, ConfigError)
            if not self.orders["is_first"]:
                if store.has("finished"):  # it was on its way to a target that needs it no more
                    return 0
            elif users_mistake or not met.is_set():  # once they have met, the link itself tells the target
                store.put("draft_failure", {"users_mistake": users_mistake, "line": f"{error}" or type(error).__name__})
                self.channel.say(_REPORTED)
            if not isinstance(error, PeerLostError):
                raise
            if not isinstance(error, RankLostError) and (code := self._code_after_target(store)) is not None:
                return code
            tell(f"the draft worker (pid {os.getpid()}) ends: {error}")
            return _FAILED
        with suppress(PeerLostError):  # the target has gone, and the store with it
            return _DISMISSED if store.has(f"dismissed/{self.incarnation}") else code
        return code

    @contextmanager
    def _wait(self, store: Store) -> Iterator[Callable[[], None]]:
        """A function that begins to tell, on a machine without the target, of the wait until both have loaded."""
        told, name = ExitStack(), f"met/{self.incarnation}"

        def end() -> None:
            with suppress(PeerLostError):
                if store.has(name):
                    told.close()

        if self.place.is_away:
            with store.watching(name, end):
                yield lambda: told.enter_context(waiting_for(BOTH_LOADED))
            end()  # a short run is over before it was looked
        else:
            yield lambda: None

    def _code_after_target(self, store: Store) -> int | None:
        """The exit code where the link has ended because the target has, or wants another draft; None: it has not."""
        dismissed = f"dismissed/{self.incarnation}"
        with suppress(PeerLostError):
            return _DISMISSED if store.await_any(("finished", dismissed), _RETURN_SECONDS) == dismissed else 0
        return None

    def _await_rendezvous(self, store: Store, ranks: str | None) -> Rendezvous:
        if ranks is not None:
            tell_ranks(store, self.incarnation, ranks)
        rendezvous = await_rendezvous(store, self.incarnation, self.config.startup_timeout_seconds)
        if rendezvous is None:
            raise Interrupted(PEER_FAILED)  # the target ended before it was ready, and has said why
        return rendezvous
