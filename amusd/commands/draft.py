"""`amusd draft`: drafts for targets of other processes and machines, one target at a time, until a signal."""

from __future__ import annotations

from amusd.commands.job import Job
from amusd.runtime.draft_process import DraftProcess
from amusd.runtime.workers import check_workers
from amusd.transport.factory import check_link


def run(job: Job) -> int:
    """Draft for targets that connect to `listen`; return the exit code. Raises `ConfigError`."""
    config = job.config.engine_for("draft")
    check_workers(config)
    assert config.transport.address is not None, "the configuration has seen to it"
    address = check_link(config.transport, config.transport.address, "draft", "listen")
    return DraftProcess(config, address, is_own=False).keep_running()
