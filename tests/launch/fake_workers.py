"""Workers without an engine, for the launcher's tests: the prompt says what happens."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from amusd.config import EngineConfig, RunConfig
from amusd.errors import ConfigError, PeerLostError
from amusd.runtime.draft_restart import FIRST_INCARNATION, DraftSource
from amusd.tracing.recorder import Recorder
from amusd.transport.base import Rendezvous
from launch.run_directory import read_config

DEADLINE_SECONDS = 60.0
COME_BACK = "draft comes back"
"""The prompt at which the target waits for the second draft."""
RENDEZVOUS = Rendezvous(address="ipc:///nowhere", nonce=2**63 + 1, ranks="/nowhere/either")


def run_target(
    command: str, runs: Sequence[tuple[RunConfig, Path]], drafts: DraftSource
) -> Generator[int | ConfigError, None, None]:
    if runs[0][0].prompt == "target refuses":
        raise ConfigError("target.model=/nowhere: no such folder")
    drafts.tell(FIRST_INCARNATION, RENDEZVOUS)
    if runs[0][0].prompt == "target refuses late":
        _await_file(runs[0][1] / "met")
        raise ConfigError("target.model=/damaged: cut short")
    if runs[0][0].prompt == COME_BACK:
        _meet_the_next(drafts, runs[0][1])
    for config, run_directory in runs:
        yield (
            _run_by_seed(command, config, run_directory)
            if config.prompt == "by seed"
            else _run(command, config, run_directory, drafts)
        )


def _meet_the_next(drafts: DraftSource, run_directory: Path) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while drafts.newest() == FIRST_INCARNATION and time.monotonic() < deadline:
        time.sleep(0.01)
    drafts.tell(FIRST_INCARNATION + 1, Rendezvous(address="ipc:///elsewhere", nonce=2))
    _await_file(run_directory / "second")  # as with the first message of a draft
    drafts.met()


def _run_by_seed(command: str, config: RunConfig, run_directory: Path) -> int | ConfigError:
    seed = config.sampling.seed
    if seed == 1:
        return ConfigError("prompt: refused")
    sys.stdout.write(f"{command} {seed}\n")
    sys.stdout.flush()
    if seed == 2:
        raise ValueError("a bug in the target")
    (run_directory / "result.json").write_text(json.dumps({"rows": []}))
    return 0


def _run(command: str, config: RunConfig, run_directory: Path, drafts: DraftSource) -> int:
    workers = json.loads((run_directory / "workers.json").read_text())
    if config.prompt == "ignore signals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
    try:
        return _act(command, config, run_directory, workers, drafts)
    finally:
        (run_directory / "result.json").write_text(json.dumps({"workers": workers}))


def _act(
    command: str, config: RunConfig, run_directory: Path, workers: dict[str, list[int]], drafts: DraftSource
) -> int:
    sys.stdout.write(f"{command} {config.prompt}\n")
    sys.stdout.flush()
    if config.prompt in ("wait", "ignore signals") or str(config.prompt).endswith((" refuses", " crashes")):
        threading.Event().wait(DEADLINE_SECONDS)
    if config.prompt == "draft is killed":
        while Path(f"/proc/{workers['draft'][0]}").exists():
            drafts.ending(0.0)  # its parent has to look, or it stays as a zombie
    return 0


def _await_file(path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def run_follower(config: EngineConfig, rank: int, address: str) -> None:
    assert config.target_tensor_parallel_size == 2
    prompt = _prompt_of(Path("out").absolute())
    assert address == RENDEZVOUS.ranks
    if prompt in ("wait", "ignore signals"):
        threading.Event().wait(DEADLINE_SECONDS)


def _prompt_of(run_directory: Path) -> str | None:
    """What the target was asked, which other processes are not told."""
    return read_config(run_directory).prompt


def main() -> None:
    """Be the draft's process."""
    from amusd.runtime import draft_process, startup  # with torch

    startup.prepare_draft = lambda _config: None
    startup.serve_draft = _serve_draft  # type: ignore[assignment]
    draft_process.main()


def _fail_at_once(prompt: str | None) -> None:
    if prompt == "draft refuses":
        raise ConfigError("drafter.model=/nowhere: no such folder")
    if prompt == "draft crashes":
        raise ValueError("a bug in the draft")


def _serve_draft(
    _config: EngineConfig, rendezvous: Rendezvous, recorder: Recorder, incarnation: int, drafters: object
) -> None:
    assert drafters is None, "none were prepared"
    folder = None if recorder.folder is None else recorder.folder.parent
    prompt = None if folder is None else _prompt_of(folder)
    _fail_at_once(prompt)
    if incarnation == 1:
        assert rendezvous == RENDEZVOUS
    if prompt == "target refuses late":
        (folder / "met").touch()
        raise PeerLostError("the link has ended")
    if prompt in ("draft is killed", COME_BACK) and incarnation == 1:
        os.kill(os.getpid(), 9)
    if prompt == COME_BACK:
        assert rendezvous == Rendezvous(address="ipc:///elsewhere", nonce=2)
        (folder / "second").write_text(str(os.getpid()))
    if prompt in ("wait", "ignore signals"):
        threading.Event().wait(DEADLINE_SECONDS)
