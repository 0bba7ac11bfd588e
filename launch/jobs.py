"""The jobs of a command: what Hydra calls once for a run, and once for each point of a sweep.

Jobs of one process share an engine as long as their engine configurations are equal. Hydra's launchers may run jobs in
other processes, each of which then keeps an engine of its own.
"""

from __future__ import annotations

import dataclasses
import io
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from amusd.config import HIDDEN, EngineConfig, RunConfig
from amusd.console import Console, tell
from amusd.errors import ConfigError, PeerError, PeerFailedError, PeerLostError
from amusd.files import keep_traceback, read_json, write_json
from amusd.runtime.cores import allowed_cores, pin_to
from amusd.types import Role

from .compose import config_of
from .devices import claim_hardware, set_environment
from .run_directory import (
    OVERRIDES_FILE,
    RESULT_FILE,
    check_unchanged,
    clear_run,
    create_run_directory,
    discard_run,
    is_complete,
    write_workers,
)
from .signals import Interrupted, raise_on_signals

if TYPE_CHECKING:
    from amusd.engine import Engine
    from amusd.runtime.draft_process import DraftProcess
    from amusd.workload import WorkloadPrompt

WITHOUT_ENGINE = ("bench", "simulate")
"""Commands that are jobs of Hydra's, and start processes of their own or none."""


class Jobs:
    """The task of one command, for `hydra.main`. Close it at the end."""

    def __init__(self, command: str) -> None:
        self.exit_code = 0
        """That of the first job that failed here."""
        self._command = command
        self._cores = allowed_cores()
        self._config: EngineConfig | None = None
        self._engine: Engine | None = None
        self._drafts: DraftProcess | None = None
        self._directory = Path()
        self._keeps_engine = True

    def __getstate__(self) -> dict[str, Any]:
        """In another process, a job makes an engine and ends it."""
        return vars(Jobs(self._command)) | {"_keeps_engine": False}

    def __call__(self, composed: DictConfig) -> float:
        """Do one job. Returns tokens a second, for sweepers that look for the best; NaN where there is no such result.

        Raises `Interrupted` alone: what fails is told in a line or with its traceback, and the next job goes on.
        """
        if self._command not in WITHOUT_ENGINE and threading.current_thread() is threading.main_thread():
            raise_on_signals()
        code = exit_code_of(lambda: self._do(composed))
        if not self._keeps_engine:
            self.close()
        self.exit_code = self.exit_code or code
        result = {} if code else read_json(self._directory / RESULT_FILE) or {}
        speeds = [row.get("tokens_per_second") for row in (result.get("metrics", result), *result.get("rows", ()))]
        return max((speed for speed in speeds if speed is not None), default=float("nan"))

    def close(self) -> None:
        """End the engine. Idempotent."""
        engine, self._engine, self._config = self._engine, None, None
        if engine is not None:
            engine.close()

    def _do(self, composed: DictConfig) -> int:
        hydra = HydraConfig.get()
        self._directory = Path(hydra.runtime.output_dir)
        is_claimed = False
        number = hydra.job.num if hydra.mode is RunMode.MULTIRUN else None
        try:
            if number is not None:
                overrides = [text for text in hydra.overrides.task if not text.startswith(("run_dir=", "output="))]
                tell(f"job {number}: {' '.join(overrides)}")
                write_json(self._directory / OVERRIDES_FILE, overrides)
            config = dataclasses.replace(config_of(composed), run_dir=str(self._directory))
            if self._command == "serve":
                config = with_api_key(config)
            if number is not None and is_complete(self._directory):
                check_unchanged(self._directory, config)
                tell(f"job {number}: done before")
                return 0
            if number is not None:
                clear_run(self._directory)
            prompts = self._prompts(config)
            if prompts is None:
                return 0
            create_run_directory(config)
            is_claimed = True
            tell(f"run directory: {self._directory}")
            return self._run(config, prompts, number)
        except ConfigError:
            if is_claimed:
                discard_run(self._directory)
            raise
        finally:
            with suppress(OSError):
                self._directory.rmdir()  # Hydra has made it; only an empty one can be removed

    def _prompts(self, config: RunConfig) -> list[WorkloadPrompt] | None:
        """The prompts, so that what is wrong with them is said before weights are loaded; None: all are answered."""
        from amusd.workload import AnswersFile, prompts_of

        if self._command not in ("generate", "compare"):
            return []
        prompts = prompts_of(self._command, config)
        if config.out is None:
            return prompts
        out = AnswersFile(config)
        if not prompts:
            tell(f"out={out.path}: all prompts are answered")
            document = {"complete": True, "out": str(out.path), "num_prompts": 0}
            Console(json_only=config.output == "json").document(document)
            return None
        with out.opened():
            return prompts  # it can be written, and no other run does

    def _run(self, config: RunConfig, prompts: Sequence[WorkloadPrompt], number: int | None) -> int:
        """Do a job in its directory. `number`: that of a job of a sweep, whose JSON is in its files alone."""
        json_only = config.output == "json"
        console = Console(json_only=json_only, out=io.StringIO() if json_only and number is not None else None)
        if self._command in WITHOUT_ENGINE:
            from . import commands

            return int(getattr(commands, f"run_{self._command}")(config, self._directory, console))
        try:
            if self._command == "serve":
                from amusd.commands.run import serve

                return serve(config, lambda _engine: self._start(config, None, console), console)
            engine = self._start(config, number, console)
            from amusd.commands.run import answer

            engine.begin_run(number or 0)
            code = answer(self._command, config, engine, console, prompts, self._directory)
        except Interrupted:
            tell("interrupted" if self._command == "serve" else f"interrupted; what there is lies in {self._directory}")
            raise
        except ConfigError:
            raise
        except Exception as error:
            keep_traceback(self._directory, Role.TARGET.value, error)
            self.close()
            raise
        if engine.draft_failure is not None:
            self.close()  # the next job has a draft again
        return code

    def _start(self, config: RunConfig, number: int | None, console: Console) -> Engine:
        """The engine of the job before if it is that of this one, else a new one. Raises why none can be had."""
        wanted = config.engine_for(self._command)
        if self._engine is not None and wanted == self._config:
            self._record()
            return self._engine
        self.close()
        pin_to(set(self._cores))
        set_environment(wanted)
        from amusd.runtime.draft_process import DraftProcess

        events = None if self._command == "serve" else events_of(self._directory, number)
        drafts = self._drafts = DraftProcess(wanted, events=events, tell_loss=tell, on_met=self._record)
        try:
            drafts.prepare()  # while torch is imported here
            settled = dataclasses.replace(wanted, hardware=claim_hardware(config, Role.TARGET).hardware)
            self._record()
            from amusd.engine import Engine
            from amusd.runtime.startup import make_recorder

            recorder = make_recorder(Role.TARGET, events)
            self._engine = Engine.connect(settled, drafts, recorder, report=console.note, process=drafts)
        except PeerError as error:
            failure = drafts.start_failure()
            if failure is None:
                raise
            raise failure from error
        finally:
            if self._engine is None:
                drafts.stop(0.3)
        self._config = wanted
        return self._engine

    def _record(self) -> None:
        """Keep `workers.json` true."""
        assert self._drafts is not None
        write_workers(self._directory, target=[os.getpid()], draft=self._drafts.pid)


def events_of(directory: Path, number: int | None) -> str:
    """The folder of events of a run, or of all jobs of its sweep, as a template in which `{run}` is a job's number."""
    whole = str(directory.parent if number is not None else directory).replace("{", "{{").replace("}", "}}")
    return f"{whole}/{{run}}/events" if number is not None else f"{whole}/events"


def with_api_key(config: RunConfig) -> RunConfig:
    """The key from the environment, unless one is named. Raises `ConfigError` for the one of a run's `config.yaml`."""
    if config.serve.api_key == HIDDEN:
        raise ConfigError(f"serve.api_key={HIDDEN}: a run does not keep its key; name one, or null")
    key = config.serve.api_key or os.environ.get("AMUSD_API_KEY") or None
    return dataclasses.replace(config, serve=dataclasses.replace(config.serve, api_key=key))


def exit_code_of(work: Callable[[], int]) -> int:
    """Do some work and return its exit code: 2 for a user's mistake, 1 for a failure, both told here."""
    try:
        return work()
    except ConfigError as error:
        tell(str(error))
        return 2
    except Exception as error:  # noqa: BLE001 - the end of the work: told in full, and the exit code says so
        if isinstance(error, PeerLostError | PeerFailedError) and "\n" not in str(error):
            tell(str(error))  # no bug of this process
        else:
            with suppress(OSError):
                traceback.print_exc(file=sys.stderr)
        return 1
