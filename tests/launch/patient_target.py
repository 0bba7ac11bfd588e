"""amusd's own workers, but for a target that goes on alone for a few passes only and then waits for its next draft.

The real one waits for nobody, so whether a draft comes back before an answer ends is a matter of how quick the machine
is.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from pathlib import Path
from unittest.mock import patch

from amusd.commands.run import run_target as run_real_target
from amusd.config import RunConfig
from amusd.errors import ConfigError
from amusd.protocol.messages import Hello
from amusd.runtime.draft_restart import DraftRestart, DraftSource
from amusd.runtime.startup import prepare_draft, run_draft, run_follower
from amusd.transport.base import Transport

__all__ = ["prepare_draft", "run_draft", "run_follower", "run_target"]

PASSES_ALONE = 3
DEADLINE_SECONDS = 60.0
_LOOK_SECONDS = 0.02


def run_target(
    command: str, runs: Sequence[tuple[RunConfig, Path]], drafts: DraftSource
) -> Generator[int | ConfigError, None, None]:
    poll = DraftRestart.poll
    num_passes = 0

    def wait(restart: DraftRestart) -> tuple[Transport, Hello] | None:
        nonlocal num_passes
        num_passes += 1
        if num_passes <= PASSES_ALONE:
            return None
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (found := poll(restart)) is None and restart.failure is None and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        return found

    with patch.object(DraftRestart, "poll", wait):
        yield from run_real_target(command, runs, drafts)
