"""The jobs of a command: one run, or the points of a sweep, called by Hydra.

Jobs of one process share an engine while their engine configurations are equal.
"""

from __future__ import annotations

import dataclasses
import io
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from amusd.checkpoints.settled import settle
from amusd.commands import COMMANDS, run_command
from amusd.commands.job import Job
from amusd.config import HIDDEN, EngineConfig, RunConfig
from amusd.console import Console
from amusd.errors import ConfigError
from amusd.files import RESULT_FILE, read_json, write_json
from amusd.logs import logger, show_lines
from amusd.policies.factory import choose_policy
from amusd.runtime.cores import allowed_cores, pin_rank, pin_to
from amusd.runtime.devices import device_of
from amusd.runtime.workers import check_workers, start_workers
from amusd.tracing.recorder import Recorder, as_format

from .compose import config_of
from .environment import set_environment
from .run_directory import OVERRIDES_FILE, WORKERS_FILE, clear_run, is_done, run_directory
from .signals import exit_code_of, raise_on_signals

if TYPE_CHECKING:
    from amusd.engine import Engine
    from amusd.workload import WorkloadPrompt

    MakeEngine = Callable[[EngineConfig, str | None], Engine]
    """Makes an engine from a configuration and the folder of its events."""


class Jobs:
    """The jobs of one command in this process. Close it at the end."""

    def __init__(self, command: str, make_engine: MakeEngine | None = None, *, keeps_engine: bool = True) -> None:
        """`make_engine`: by default a target in this process and a draft in a child process."""
        self.exit_code = 0
        self._command = command
        self._make_engine = make_engine or self._make_pair
        self._cores = allowed_cores()
        self._config: EngineConfig | None = None
        self._engine: Engine | None = None
        self._directory = Path()
        self._keeps_engine = keeps_engine
        self._links: Path | None = None
        """A folder of links, named by job number, to the job folders of a sweep, which users name."""
        self._running = ExitStack()
        """Ends the engine, and removes the links."""

    def __reduce__(self) -> Any:
        """In another process, each job has an engine of its own."""
        return partial(Jobs, keeps_engine=False), (self._command,)

    def __call__(self, composed: DictConfig) -> float:
        """Run one job for Hydra. A failure is logged, so that the next job runs; raises `KeyboardInterrupt` only.

        Returns the greatest tokens per second, for optimizing sweepers; NaN without a result.
        """
        show_lines()  # this may be another process than the command's
        if threading.current_thread() is threading.main_thread():
            raise_on_signals()
        code = exit_code_of(lambda: self._do(composed))
        self.exit_code = self.exit_code or code
        if code == 1 or not self._keeps_engine:  # the next job needs an engine with a draft
            self.close()
        result = {} if code else read_json(self._directory / RESULT_FILE) or {}
        speeds = [row.get("tokens_per_second") for row in (result.get("metrics", result), *result.get("rows", ()))]
        return max((speed for speed in speeds if speed is not None), default=float("nan"))

    def close(self) -> None:
        """End the engine. Idempotent."""
        self._engine = self._config = self._links = None
        self._running.close()

    def _do(self, composed: DictConfig) -> int:
        hydra = HydraConfig.get()
        self._directory = Path(hydra.runtime.output_dir)
        try:
            number = hydra.job.num if hydra.mode is RunMode.MULTIRUN else None
            if number is not None:
                overrides = [text for text in hydra.overrides.task if not text.startswith(("run_dir=", "output="))]
                logger.info(f"job {number}: {' '.join(overrides)}")
                write_json(self._directory / OVERRIDES_FILE, {"job": number, "overrides": overrides})
            return self.run(dataclasses.replace(config_of(composed), run_dir=str(self._directory)), number)
        finally:
            with suppress(OSError):
                self._directory.rmdir()  # made by Hydra; only removed if empty

    def run(self, config: RunConfig, number: int | None = None) -> int:
        """Do one job; return its exit code. Raises `ConfigError`, `PeerError`, `KeyboardInterrupt`.

        `number`: the job's number in a sweep, in which jobs print no JSON and finished jobs are not repeated.
        """
        command, json_only = COMMANDS[self._command], config.output == "json"
        console = Console(json_only=json_only, out=io.StringIO() if json_only and number is not None else None)
        if command.computes:
            engine = config.engine_for(self._command)
            for drafter, policy in product(engine.drafters, config.asynchronous_policies() or (config.policy,)):
                choose_policy(config.sampling, drafter.kind, dataclasses.replace(config.decoding(), policy=policy))
            if command.has_result:  # the configuration that is kept names the dtype
                check_workers(engine)
                config = settle(config, device_of(engine, "target"))
        if self._command == "serve":
            config = with_api_key(config)
        if number is not None:
            if is_done(self._directory, config):
                logger.info(f"job {number}: done before")
                return 0
            clear_run(self._directory)
        make_engine = partial(self._engine_of, config, number)
        if not command.has_folder:
            return run_command(self._command, Job(config, console, Path(), [], make_engine))
        prompts = self._prompts(config, console) if command.needs_prompts else []
        if prompts is None:
            return 0
        with run_directory(config) as self._directory:
            set_environment(config.hardware.num_threads)
            code = run_command(self._command, Job(config, console, self._directory, prompts, make_engine))
            if self._engine is None:  # else `_engine_of` has logged it
                logger.info(f"run directory: {self._directory}")
        return code

    def _prompts(self, config: RunConfig, console: Console) -> list[WorkloadPrompt] | None:
        """The prompts, checked before weights are loaded; None if all prompts are answered."""
        from amusd.workload import AnswersFile, prompts_of

        prompts = prompts_of(self._command, config)
        if config.out is None:
            return prompts
        out = AnswersFile(config)
        if not prompts:
            logger.info(f"out={out.path}: all prompts are answered")
            console.document({"complete": True, "out": str(out.path), "num_prompts": 0})
            return None
        with out.opened():
            return prompts  # `out` can be written, and no other run has it open

    def _engine_of(self, config: RunConfig, number: int | None) -> Engine:
        """The engine of a job, kept for the next job."""
        wanted = config.engine_for(self._command)
        if wanted != self._config:
            self.close()
        events = self._events(number) if COMMANDS[self._command].has_result else None
        if self._engine is None:
            self._engine = self._running.enter_context(self._make_engine(wanted, events))
            self._config = wanted
            self._engine.draft.on_met = self._record
        self._engine.worker.begin_run(number or 0)
        self._record()
        logger.info(f"run directory: {self._directory}")
        return self._engine

    def _make_pair(self, wanted: EngineConfig, events: str | None) -> Engine:
        pin_to(set(self._cores))
        settled, drafts, rendezvous = start_workers(wanted)
        if set(settled.hardware.devices) == {"cpu"}:
            pin_rank(settled, "target", self._cores)
        from amusd.engine import Engine

        return Engine.connect(settled, drafts, Recorder("target", events), rendezvous)

    def _events(self, number: int | None) -> str:
        """The folder of this job's events; in a sweep as a format in which `{run}` is a job's number."""
        if number is None:
            return f"{as_format(self._directory)}/events"
        self._links = self._links or Path(self._running.enter_context(TemporaryDirectory(prefix="amusd-sweep-")))
        (self._links / str(number)).symlink_to(self._directory)
        return f"{as_format(self._links)}/{{run}}/events"

    def _record(self) -> None:
        """Write `workers.json`: before the first token, and again for each further draft."""
        if self._engine is not None:
            rendezvous = self._engine.rendezvous
            others = [] if rendezvous is None else rendezvous.pids
            drafts = filter(None, [self._engine.draft.pid])
            write_json(self._directory / WORKERS_FILE, {"target": [os.getpid(), *others], "draft": [*drafts]})


def with_api_key(config: RunConfig) -> RunConfig:
    """Add the environment's API key unless the configuration names a key. Raises `ConfigError` for a hidden key."""
    if config.serve.api_key == HIDDEN:
        raise ConfigError(f"serve.api_key={HIDDEN}: a run does not keep its key; name one, or null")
    key = config.serve.api_key or os.environ.get("AMUSD_API_KEY") or None
    return dataclasses.replace(config, serve=dataclasses.replace(config.serve, api_key=key))
