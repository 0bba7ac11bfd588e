"""The target's other ranks on one machine: child processes that repeat the first one's passes (`ranks.py`)."""

from __future__ import annotations

import shutil
import tempfile
import threading

from amusd.child import ForkServer, Orders, command_of, serve
from amusd.config import EngineConfig
from amusd.models.meeting import Meeting
from amusd.runtime.cores import allowed_cores, pin_rank
from amusd.runtime.devices import device_of
from amusd.settings import from_mapping, to_mapping


def start_followers(config: EngineConfig) -> Meeting:
    """Start the target's ranks 1 and up, without waiting; returns where they meet, which ends them."""
    address = tempfile.mkdtemp(prefix="amusd-ranks-")
    settings = {"config": to_mapping(config), "cores": allowed_cores(), "address": address}
    others = [ForkServer(command_of(__name__), settings) for _ in range(1, config.target_tensor_parallel_size)]
    for rank, other in enumerate(others, 1):
        other.start({"rank": rank})
    return Meeting(address, others=others)


def main() -> None:
    """Be the process that `start_followers` starts."""
    serve(lambda _settings: None, _follow, _leave)


def _follow(settings: Orders, orders: Orders, _prepared: object) -> int:
    config, rank = from_mapping(EngineConfig, settings["config"]), orders["rank"]
    if device_of(config, "target", rank) == "cpu":
        pin_rank(config, "target", settings["cores"], rank)
    from amusd.runtime.startup import run_follower

    run_follower(config, rank, Meeting(settings["address"]))
    threading.Event().wait()  # for `_leave`, since torch would take a second to leave
    return 0


def _leave(settings: Orders) -> None:
    if settings:
        shutil.rmtree(settings["address"], ignore_errors=True)
