"""Starts the processes beside the target's first rank: its draft, and its other ranks. Imports no torch."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from amusd.child import ForkServer, Orders, command_of, serve
from amusd.config import EngineConfig
from amusd.errors import ConfigError, RankLostError
from amusd.files import CONFIG_JSON, TOKENIZER, check_checkpoint, make_socket_folder
from amusd.runtime.cores import allowed_cores, pin_rank
from amusd.runtime.devices import device_of, warn_of_sharing, with_devices
from amusd.runtime.draft_process import DraftSource
from amusd.settings import from_mapping, to_mapping
from amusd.transport.factory import check_link
from amusd.types import Role


@dataclass(eq=False)
class Rendezvous:
    """The place where one target's ranks meet, and the processes of ranks started here. For several threads."""

    address: str
    """A private folder on one machine, else `tcp://HOST:PORT`, where rank R uses port PORT + R."""
    host: str = "127.0.0.1"
    """This machine's address, for gloo."""
    store: Any = None
    """Torch's store, for the process group; None: a file in the folder."""
    others: Sequence[ForkServer] = ()
    """Processes of ranks 1 and up, if they were started here: `stop` ends them and removes the folder."""

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that were started here."""
        return [other.pid for other in self.others]

    def failure(self, rank: int, timeout: float, /) -> RankLostError | None:
        """The error of a rank's process that was started here, if it fails within `timeout` seconds; else None."""
        end = self.others[rank - 1].ended(timeout) if self.others else None
        return RankLostError(end.in_words(f"rank {rank} of the target")) if end is not None and end.code else None

    def stop(self) -> None:
        """End the processes of ranks that were started here. Idempotent."""
        for other in self.others:
            other.close()
        if self.others:
            shutil.rmtree(self.address, ignore_errors=True)


def start_workers(config: EngineConfig) -> tuple[EngineConfig, DraftSource | None, Rendezvous | None]:
    """Start the processes that `config` needs, without waiting. They load while this process imports torch.

    Returns `config` with every rank's device named, the source of drafts if there is a drafter, and the rendezvous of
    the ranks if there are several. Raises `ConfigError`.
    """
    check_workers(config)
    if config.transport.address is not None and config.draft_address is None:
        for role in get_args(Role):  # both ends are here
            check_link(config.transport, config.transport.address, role, "transport.address")
    with ExitStack() as failing:
        drafts, rendezvous = None, None
        if config.drafters:
            drafts = DraftSource(config, config.draft_address)
            failing.callback(drafts.stop)
        if config.target_tensor_parallel_size > 1:
            rendezvous = start_followers(config)
            failing.callback(rendezvous.stop)
        warn_of_sharing(config)
        config = replace(config, hardware=with_devices(config))
        failing.pop_all()
    return config, drafts, rendezvous


def check_workers(config: EngineConfig) -> None:
    """Check folders, addresses, cores and ranks, without reading weights."""
    check_folders(config)
    check_ranks(config)


def check_folders(config: EngineConfig) -> None:
    """Raise `ConfigError` for a folder without a model, a missing factory, or an unsafe `drafter.address`."""
    stages = [stage for drafter in config.drafters if not drafter.is_elsewhere for stage in drafter.stages]
    for kind, model in [(config.target.kind, config.target.model), *((stage.kind, stage.model) for stage in stages)]:
        if model is not None:
            check_checkpoint(model, CONFIG_JSON, *([TOKENIZER] if kind == "hf" else []))
    for file in (stage.factory.rpartition(":")[0] for stage in stages if stage.factory):
        if file.endswith(".py") and not Path(file).is_file():
            raise ConfigError(f"drafter.factory={file}: no such file")
    if config.draft_address is not None:
        check_link(config.transport, config.draft_address, "target", "drafter.address")


def check_ranks(config: EngineConfig) -> None:
    """Raise `ConfigError` for more threads than cores, or more ranks than the target has key heads."""
    most = os.cpu_count() or 1
    config.hardware.require(config.hardware.num_threads <= most, "num_threads", f"this machine has {most} cores")
    if config.target_tensor_parallel_size > 1:
        from amusd.checkpoints.loading import check_target

        check_target(config)


def start_followers(config: EngineConfig) -> Rendezvous:
    """Start the target's ranks 1 and up, without waiting. `stop` of the rendezvous ends them."""
    address = make_socket_folder("amusd-ranks-")
    settings = {"config": to_mapping(config), "cores": allowed_cores(), "address": address}
    others = [ForkServer(command_of(__name__), settings) for _ in range(1, config.target_tensor_parallel_size)]
    for rank, other in enumerate(others, 1):
        other.start({"rank": rank})
    return Rendezvous(address, others=others)


def main() -> None:
    """Entry point of the processes that `start_followers` starts."""
    serve(lambda _settings: None, _follow, _leave)


def _follow(settings: Orders, orders: Orders, _prepared: object) -> int:
    config, rank = from_mapping(EngineConfig, settings["config"]), orders["rank"]
    if device_of(config, "target", rank) == "cpu":
        pin_rank(config, "target", settings["cores"], rank)
    from amusd.runtime.startup import run_follower

    run_follower(config, rank, Rendezvous(settings["address"]))
    threading.Event().wait()  # `_leave` ends this process; an ordinary exit takes torch a second
    return 0


def _leave(settings: Orders) -> None:
    if settings:
        shutil.rmtree(settings["address"], ignore_errors=True)
