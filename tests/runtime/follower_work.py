"""A follower without a model, for `test_followers.py`: the address says what it does."""

from __future__ import annotations

import os
import threading

from amusd.config import EngineConfig
from amusd.errors import ConfigError


def run_follower(_config: EngineConfig, rank: int, address: str) -> None:
    if address == "wait" or (address != "return" and rank == 1):
        threading.Event().wait()
    if address == "refuse":
        raise ConfigError("no such device")
    if address == "crash":
        raise ValueError("a bug")
    if address == "exit":
        os._exit(7)
