"""A follower without a model, for `test_followers.py`: the name of the target says what it does."""

from __future__ import annotations

import os
import threading

from amusd.config import EngineConfig
from amusd.models.meeting import Meeting


def run_follower(config: EngineConfig, rank: int, _meeting: Meeting) -> None:
    if config.target.model == "wait" or rank == 1:
        threading.Event().wait()
    if config.target.model == "crash":
        raise ValueError("a bug")
    os._exit(7)
