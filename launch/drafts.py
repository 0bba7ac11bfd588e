"""How the target finds its draft, as a child or, under torchrun, through the store; and how all ranks find the draft's.

In the store, K is an incarnation of the draft and R a rank of it:

draft                 {incarnation, pids, supervisor}: the newest process (where    written by the last rank, which
                      it loads for all lives, that one) and those of its other     starts it, and is the supervisor
                      ranks
draft_pids/K          process ids of incarnation K and of its other ranks          written by that
met/K                 incarnation K has loaded, and the target too                 written by the target
rendezvous/K          where incarnation K finds the target                         written by the target
                      (with the first one, where the target's other ranks find it)
dismissed/K           incarnation K is to be replaced, though it may still run     written by the target
no_more_drafts        whoever waits for a rendezvous may go                        written by the target
finished              as that, and the run is over                                 written by the target
draft_gathers         incarnation that gathers the draft's other ranks             written by the last rank
draft_pid_R/K         process id of rank R, which has heard of incarnation K       written by that rank
draft_ranks/K         where incarnation K awaits its other ranks                   written by the last rank

A draft of which one rank is lost is lost as a whole: its process on the last rank ends, and the next one gathers the
others again, which outlive it, and of which the lost one has been started anew.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amusd.errors import PeerLostError
from amusd.runtime.draft_restart import FIRST_INCARNATION
from amusd.runtime.supervisor import DraftProcess
from amusd.transport.base import Rendezvous

from .run_directory import write_workers
from .signals import continue_if_stopped
from .store import LOOK_SECONDS, Store
from .terminal import waiting_for

OVER = ("finished", "no_more_drafts")
"""Names of which each says that no further draft is wanted."""
_GATHERS = "draft_gathers"
_READ_SECONDS = 1.0  # for a value that is there
_PIDS_SECONDS = 60.0
"""How long they may take to arrive after the draft itself."""
BOTH_LOADED = "both models to load (startup_timeout_seconds, once one of them has)"
"""What two machines wait for before the first token."""


class ChildDrafts(DraftProcess):
    """A draft that the target's process starts itself, and names in `workers.json`."""

    _directory: Path | None = None

    def record(self, directory: Path) -> None:
        """Keep `workers.json` true in this run directory from now on."""
        self._directory = directory
        self._write()

    def met(self) -> None:
        """Its process is known by now, and `workers.json` names it."""
        super().met()
        self._write()

    def _write(self) -> None:
        if self._directory is not None and self.pid is not None:
            write_workers(self._directory, target=[os.getpid()], draft=[self.pid])


@dataclass
class StoreDrafts:
    """The target's side. Satisfies `amusd.runtime.draft_restart.DraftSource`."""

    store: Store
    pids: Sequence[int]
    """Of the draft that was met last, or that prepares: of its ranks, in their order."""
    target_pids: Sequence[int]
    """Of the target's ranks, in their order."""
    are_away: bool = False
    """They are on another machine: a person is told of the wait for the first one."""
    _wait: ExitStack = field(default_factory=ExitStack)
    _told: int = FIRST_INCARNATION
    _directory: Path | None = None

    def record(self, directory: Path) -> None:
        """Keep `workers.json` true in this run directory from now on."""
        self._directory = directory
        write_workers(directory, target=self.target_pids, draft=self.pids)

    def newest(self) -> int:
        """Incarnation of the newest process. Raises `PeerLostError` when the store is gone."""
        return int(self._newest()["incarnation"])

    def ending(self, _timeout: float, /) -> str | None:
        """See `DraftSource`: that it has ended is known once the next process is there. Does not wait."""
        return None if self.newest() <= self._told else "its process has ended, and said why on standard error"

    def tell(self, incarnation: int, rendezvous: Rendezvous | None) -> None:
        """Where it finds the target; None: no further one is wanted."""
        if rendezvous is None:
            with suppress(PeerLostError):  # nobody is left to tell
                self.store.put("no_more_drafts", True)
            return
        self._told = incarnation
        if incarnation == FIRST_INCARNATION and self.are_away:
            self._wait.enter_context(waiting_for(BOTH_LOADED))
        self.store.put(f"rendezvous/{incarnation}", dataclasses.asdict(rendezvous))

    def met(self) -> None:
        """Its processes are known by now, and `workers.json` names them."""
        self._wait.close()
        self.store.put(f"met/{self._told}", True)
        self.pids = self.store.get(pids_of(self._told), _PIDS_SECONDS)
        if self._directory is not None:
            self.record(self._directory)

    def go_on(self) -> None:
        """Continue the supervisor if a signal has stopped it: it would not end."""
        continue_if_stopped(int(self._newest()["supervisor"]))

    def dismiss(self) -> None:
        """Its link is about to be closed, which ends it; this says that another one is wanted."""
        with suppress(PeerLostError):
            self.store.put(f"dismissed/{self._told}", True)

    def _newest(self) -> dict[str, Any]:
        values: dict[str, Any] = self.store.get("draft", _READ_SECONDS)
        return values


def pids_of(incarnation: int) -> str:
    """Under which name the process ids of this incarnation's ranks are told, once it runs."""
    return f"draft_pids/{incarnation}"


def await_rendezvous(store: Store, incarnation: int, timeout: float) -> Rendezvous | None:
    """The other side: where this incarnation connects; None when no draft is wanted any more.

    The target's other ranks wait for the first one's. Only those and the first draft can expect to be told within
    `timeout` seconds; others wait as long as the run lasts. Raises `PeerLostError`.
    """
    name = f"rendezvous/{incarnation}"
    found = store.await_any((name, *OVER), timeout if incarnation == FIRST_INCARNATION else None)
    return Rendezvous(**store.get(name, timeout)) if found == name else None


def gather_ranks(store: Store, incarnation: int, size: int, timeout: float) -> list[int] | None:
    """The last rank's: process ids of the draft's `size - 1` others, once all have heard of this incarnation.

    None when no draft is wanted any more. Raises `PeerLostError` after `timeout` seconds for one of them.
    """
    pids = []
    if size > 1:
        store.put(_GATHERS, incarnation)
    for rank in range(1, size):
        name = _pid_of_rank(rank, incarnation)
        if store.await_any((name, *OVER), timeout) != name:
            return None
        pids.append(int(store.get(name, _READ_SECONDS)))
    return pids


def addresses(store: Store, rank: int) -> Iterator[str]:
    """Another rank's: where each incarnation awaits it, one after another, as long as drafts are wanted.

    Raises `PeerLostError` when the store is gone.
    """
    heard = told = 0
    while not _is_over(store):
        newest = int(store.get(_GATHERS, _READ_SECONDS)) if store.has(_GATHERS) else 0
        if newest > heard:
            store.put(_pid_of_rank(rank, newest), os.getpid())
            heard = newest
        if heard > told and store.has(address_of(heard)):
            told = heard
            yield store.get(address_of(heard), _READ_SECONDS)
        else:
            time.sleep(LOOK_SECONDS)


def _is_over(store: Store) -> bool:
    return any(store.has(name) for name in OVER)


def _pid_of_rank(rank: int, incarnation: int) -> str:
    return f"draft_pid_{rank}/{incarnation}"


def address_of(incarnation: int) -> str:
    """Under which name it is told where this incarnation awaits the other ranks."""
    return f"draft_ranks/{incarnation}"
