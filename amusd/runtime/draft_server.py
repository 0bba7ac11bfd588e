"""The draft's process at work: it loads, listens, serves one target, and listens again."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from amusd.checkpoints.building import device_errors
from amusd.checkpoints.loading import describe_drafter
from amusd.checkpoints.tokenizer import Tokenizer
from amusd.config import DrafterConfig, EngineConfig, TransportConfig
from amusd.drafters.base import Drafter, DrafterFactory
from amusd.drafters.factory import StartInner, load_drafters
from amusd.errors import ConfigError, PeerLostError
from amusd.files import keep_traceback
from amusd.logs import logger, warn_once
from amusd.protocol.messages import DraftHello, TargetHello
from amusd.runner.model_runner import ModelRunner
from amusd.runtime.connection import Connection
from amusd.runtime.devices import check_devices, claim_device, device_of, link_devices
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.draft_process import FAILED, TOLD
from amusd.runtime.draft_source import DraftSource
from amusd.runtime.draft_worker import DraftWorker
from amusd.runtime.hello import BUSY, check_pair, failure_report
from amusd.runtime.remote_drafter import RemoteDrafter
from amusd.tracing.recorder import Recorder
from amusd.transport.base import Transport
from amusd.transport.factory import is_removed, listen

IDLE_SECONDS = 1.0


class Offer(NamedTuple):
    """What a draft has for its targets."""

    drafters: Mapping[str, Sequence[Drafter]]
    tokenizer_hash: str
    notes: Sequence[str] = ()


def prepare(config: EngineConfig) -> Offer | None:
    """Load what forked draft processes share; None where each has to load for itself.

    It has to on a GPU, which is lost in a fork, with an inner drafter elsewhere, and where a loading failure must be
    reported.
    """
    has_others = any(drafter.inner_device is not None for drafter in config.drafters)
    if device_of(config, "draft") != "cpu" or has_others or not sys.platform.startswith("linux"):
        return None
    torch.set_num_threads(1)  # the other threads of a pool would be missing in the fork
    try:
        return load(config)
    except Exception:  # noqa: BLE001 - whatever it is, it comes again where it can be reported
        logger.debug("the draft does not load", exc_info=True)
        return None


def load(config: EngineConfig, inner: StartInner | None = None) -> Offer:
    """Load the models, and make the drafters: on a GPU it takes seconds. Raises whatever keeps it from that."""
    start, device = time.monotonic(), claim_device(config, "draft")
    loaded = load_drafters(config, device, inner)
    named = "; ".join(describe_drafter(drafter, config, device) for drafter in config.drafters)
    logger.info("draft: %s, %.1f s", named, time.monotonic() - start)
    with device_errors(device, only_full=True):
        made = {name: make(config.max_num_seqs) for name, make in loaded.factories.items()}
    return Offer(made, loaded.tokenizer_hash, loaded.notes)


@dataclass
class DraftServer:
    """Serves the targets that come to an address, one at a time."""

    config: EngineConfig
    address: str
    is_own: bool
    """Whether the target has started it: it serves one session, and what fails is the target's to say."""
    last_code: int | None = None
    """Exit code of the draft before, if there was one."""

    def run(self, prepared: Offer | None = None) -> int:
        """Load unless that has been done, and serve; return the exit code.

        A fork serves one target, and so does an own draft; else the first failure ends the process. An own draft that
        cannot load tells its target why; else the error is raised.
        """
        torch.set_num_threads(self.config.hardware.num_threads)  # which `prepare` has set to another
        with ExitStack() as others:
            offer: Offer | Exception
            try:
                offer = prepared or load(self.config, partial(start_inner, self.config, others))
            except Exception as error:
                if not self.is_own:
                    raise
                offer = error
            while True:
                try:
                    link = listen(self.config.transport, self.address, devices=link_devices(self.config))
                except ConfigError:
                    if self.is_own and is_removed(self.address):
                        return TOLD
                    raise
                link.answer_to_others = BUSY
                with closing(link):
                    if not self.is_own and self.last_code is None:
                        logger.info("draft: listens at %s", link.address)
                    code = self.serve_target(link, offer)
                self.last_code = code or 0
                if code is not None and (code or self.is_own or prepared is not None):
                    return code

    def serve_target(self, link: Transport, offer: Offer | Exception) -> int | None:
        """Draft for the target that comes, until it is done; return the exit code, None if it came to nothing."""
        recorder = Recorder("draft")
        try:
            if (hello := _hello(link)) is None:
                return None
            recorder = self.recorder_of(hello)
            if isinstance(offer, Exception):
                raise offer
            own = DraftHello(hello.incarnation, offer.tokenizer_hash, tuple(offer.drafters), os.getpid())
            check_pair(hello, own)
            link.send(own)
            for note in offer.notes if hello.incarnation == 1 else ():
                warn_once(f"draft: {note}")
            with device_errors(device_of(self.config, "draft"), only_full=True):
                DraftWorker(link, offer.drafters, hello.incarnation, recorder).run()
        except Exception as error:  # noqa: BLE001 - the target must hear the reason, not only that the link went dead
            with suppress(PeerLostError):
                link.send(failure_report(error))
            recorder.flush()
            return self._failed(error, recorder)
        return 0

    def recorder_of(self, hello: TargetHello) -> Recorder:
        """Where the session's events go."""
        return Recorder("draft", hello.events if self.is_own else None)

    def _failed(self, error: Exception, recorder: Recorder) -> int:
        """Exit code after this error; what is not known yet is shown, unless the draft before has failed, too."""
        code = TOLD if isinstance(error, (ConfigError, PeerLostError)) else FAILED
        runs_users_code = any(drafter.factory is not None for drafter in self.config.drafters)
        has_traceback = code == FAILED or (runs_users_code and error.__cause__ is not None)
        if has_traceback and recorder.folder is not None:
            keep_traceback(recorder.folder.parent, "draft", error)
        if code == FAILED and self.last_code != FAILED:
            traceback.print_exception(error)
        if code != FAILED and not self.is_own:  # a target's own affair
            logger.warning("draft: a target is refused or gone: %s", error)
            return 0
        return code


def _hello(link: Transport) -> TargetHello | None:
    """What the next target says first; None where one leaves or says something else. Raises `ConfigError`."""
    try:
        while (message := link.receive(IDLE_SECONDS)) is None:
            pass
    except PeerLostError:
        return None
    return message if isinstance(message, TargetHello) else None


def start_inner(
    config: EngineConfig, running: ExitStack, drafter: DrafterConfig, middle: ModelRunner, tokenizer: Tokenizer
) -> DrafterFactory:
    """Start a process for a cascade's inner drafter, which ends with `running`; returns the maker of its drafters.

    Raises `ConfigError` when the two do not fit, `PeerError` when it does not come.
    """
    assert drafter.inner_device is not None
    check_devices([drafter.inner_device])
    hardware = replace(config.hardware, devices=(device_of(config, "draft"), drafter.inner_device))
    stage = drafter.stages[1]
    config = replace(
        config, drafters=(stage,), hardware=hardware, transport=TransportConfig(), target_tensor_parallel_size=1
    )
    connection = Connection.to(DraftSource(config), config, running)
    connection.await_first(tokenizer.fingerprint)
    connection.source = None  # a lost one is not replaced
    client = DraftClient(Recorder("target"), connection)
    return lambda number: [RemoteDrafter(client, stage.kind, middle.num_ids) for _ in range(number)]
