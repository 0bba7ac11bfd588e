"""The target's ways to its draft: as a child, or through the store of the rank that starts drafts (`draft.py`).

Both ways also start the target's other ranks.

In the store, K is an incarnation of the draft, and R a rank of torchrun's:

draft                 {incarnation, pid, supervisor}:  the newest process (where    written by the last rank, which
                      it loads for all lives, that one)                             starts it: the supervisor
draft_pid/K           process id of incarnation K                                   written by the last rank
failure               {users_mistake, line}: why no draft can start, or what ended   written by the rank that found it
                      a rank of the target
met/K                 incarnation K has loaded, and the target too                  written by the target
rendezvous/K          where incarnation K finds the target                          written by the target
dismissed/K           incarnation K is to be replaced, though it may still run      written by the target
no_more_drafts        whoever waits for a rendezvous may go                         written by the target
finished              as that, and the run is over                                  written by the target
ranks                 where the first rank of the target awaits those that other    written by the target
                      processes look after
here/R, left/R        rank R has come (`nodes.Member`), needs the store no more     written by rank R
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from amusd.child import Lives, command_of
from amusd.config import EngineConfig
from amusd.console import waiting_for
from amusd.errors import ConfigError, PeerError, PeerFailedError, PeerLostError
from amusd.runtime.draft_process import DraftProcess
from amusd.runtime.draft_restart import FIRST_INCARNATION
from amusd.runtime.followers import Followers
from amusd.transport.base import Rendezvous

from .run_directory import write_workers
from .signals import continue_if_stopped
from .store import Store

OVER = ("finished", "no_more_drafts")
"""Names of which each says that no further draft is wanted."""
_READ_SECONDS = 1.0  # for a value that is there
_PID_SECONDS = 60.0
"""How long it may take to arrive after the draft itself."""
BOTH_LOADED = "both models to load (startup_timeout_seconds, once one of them has)"
"""Words for what two machines wait for before the first token."""


class ChildDrafts(DraftProcess):
    """A draft that the target's process starts itself, and names in `workers.json`."""

    def __init__(
        self, config: EngineConfig, events: str | None, *, work: str | None, tell_loss: Callable[[str], None]
    ) -> None:
        """See `DraftProcess`; `work`: a module whose `main` is run in the place of the draft's own (tests)."""
        super().__init__(config, events=events, tell_loss=tell_loss, on_met=self._write)
        if work is not None:
            self._lives = Lives(command_of(work), is_quiet=True)
        self._directory: Path | None = None
        self.followers = Followers(tell_loss)
        """The target's other ranks, if they are prepared."""

    def tell(self, incarnation: int, rendezvous: Rendezvous | None) -> None:
        """Start the draft, and the target's other ranks with the first one."""
        if rendezvous is not None:
            self.followers.meet(rendezvous)
        super().tell(incarnation, rendezvous)

    def record(self, directory: Path) -> None:
        """Keep `workers.json` true in this run directory from now on."""
        self._directory = directory
        self._write()

    def _write(self) -> None:
        if self._directory is not None:
            write_workers(self._directory, target=[os.getpid(), *self.followers.pids], draft=self.pid)


class StoreDrafts:
    """The target's side of the store. Satisfies `amusd.runtime.draft_restart.DraftSource`."""

    def __init__(
        self,
        store: Store,
        *,
        tell_loss: Callable[[str], None],
        are_away: bool = False,
    ) -> None:
        """`are_away`: they are on another machine, and a person is told of the wait for the first one."""
        self.followers = Followers(tell_loss)
        """The target's."""
        self.pid: int | None = None
        """Process id of the draft that was met last, or that prepares."""
        self._store = store
        self._are_away = are_away
        self._wait = ExitStack()
        self._told = FIRST_INCARNATION
        self._directory: Path | None = None

    def await_first(self, timeout: float) -> None:
        """Wait until a process prepares for the first draft. Raises what is reported instead, or `PeerLostError`."""
        if self._store.await_any(("draft", "failure"), timeout) == "failure":
            raise self.start_failure() or PeerLostError("the draft is gone")
        self.pid = self._newest()["pid"]

    def record(self, directory: Path) -> None:
        """Keep `workers.json` true in this run directory from now on."""
        self._directory = directory
        write_workers(directory, target=[os.getpid(), *self.followers.pids], draft=self.pid)

    def newest(self) -> int:
        """Incarnation of the newest process. Raises `PeerLostError` when the store is gone."""
        return int(self._newest()["incarnation"])

    def ending(self, _timeout: float, /) -> str | None:
        """See `DraftSource`: that it has ended is known once the next process is there. Does not wait."""
        return None if self.newest() <= self._told else "its process has ended, and said why on standard error"

    def start_failure(self) -> ConfigError | PeerError | None:
        """Why no draft can start, as its side has reported; None while one may. Does not wait."""
        try:
            if not self._store.has("failure"):
                return None
            failure = self._store.get("failure", _READ_SECONDS)
        except PeerLostError:
            return PeerLostError("the other worker's machine is gone")
        except ConfigError as forged:
            return forged
        return (ConfigError if failure["users_mistake"] else PeerFailedError)(failure["line"])

    def tell(self, incarnation: int, rendezvous: Rendezvous | None) -> None:
        """Tell it where it finds the target; None: no further one is wanted."""
        if rendezvous is None:
            with suppress(PeerLostError):  # nobody is left to tell
                self._store.put("no_more_drafts", True)
            return
        self.followers.meet(rendezvous)
        if rendezvous.ranks is not None:
            self._store.put("ranks", rendezvous.ranks)
        self._told = incarnation
        if incarnation == FIRST_INCARNATION and self._are_away:
            self._wait.enter_context(waiting_for(BOTH_LOADED))
        self._store.put(f"rendezvous/{incarnation}", dataclasses.asdict(rendezvous))

    def met(self) -> None:
        """Its processes are known by now, and `workers.json` names them."""
        self._wait.close()
        self._store.put(f"met/{self._told}", True)
        self.pid = self._store.get(pid_of(self._told), _PID_SECONDS)
        if self._directory is not None:
            self.record(self._directory)

    def go_on(self) -> None:
        """Continue the supervisor if a signal has stopped it: it would not end."""
        continue_if_stopped(int(self._newest()["supervisor"]))

    def dismiss(self) -> None:
        """Its link is about to be closed, which ends it; this says that another one is wanted."""
        with suppress(PeerLostError):
            self._store.put(f"dismissed/{self._told}", True)

    def _newest(self) -> dict[str, Any]:
        values: dict[str, Any] = self._store.get("draft", _READ_SECONDS)
        return values


def pid_of(incarnation: int) -> str:
    """Under which name the process id of this incarnation is told, once it runs."""
    return f"draft_pid/{incarnation}"


def await_rendezvous(store: Store, incarnation: int, timeout: float) -> Rendezvous | None:
    """The other side: where this incarnation connects; None when no draft is wanted any more.

    Only the first draft can expect to be told within `timeout` seconds; others wait as long as the run lasts. Raises
    `PeerLostError`.
    """
    name = f"rendezvous/{incarnation}"
    found = store.await_any((name, *OVER), timeout if incarnation == FIRST_INCARNATION else None)
    return Rendezvous(**store.get(name, timeout)) if found == name else None
