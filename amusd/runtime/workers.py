"""Starts the processes beside the target's first rank: a draft, and the target's other ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from amusd.config import EngineConfig
from amusd.models.meeting import Meeting
from amusd.runtime.devices import settle_devices
from amusd.runtime.draft_process import DraftProcess
from amusd.runtime.followers import start_followers


def start_workers(
    config: EngineConfig,
    note: Callable[[str], None],
    *,
    events: str | None = None,
    tell_loss: Callable[[str], None] | None = None,
    on_met: Callable[[], None] = lambda: None,
) -> tuple[EngineConfig, DraftProcess | None, Meeting | None]:
    """Start what `config` needs, without waiting: all of it loads while this process imports torch.

    Returns `config` with every rank's device named, the drafts, and where the ranks meet, if there are several. `note`:
    as `tell` of `settle_devices`; the others are those of `DraftProcess`. Raises `ConfigError` for a missing GPU.
    """
    with ExitStack() as failing:
        drafts, meeting = None, None
        if config.drafters:
            drafts = DraftProcess(config, events=events, tell_loss=tell_loss, on_met=on_met)
            failing.callback(drafts.stop)
        if config.target_tensor_parallel_size > 1:
            meeting = start_followers(config)
            failing.callback(meeting.stop)
        config = replace(config, hardware=settle_devices(config, note))
        failing.pop_all()
    return config, drafts, meeting
