"""The draft's process: it loads, listens, serves one target, and listens again."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from amusd.checkpoints.building import device_errors
from amusd.checkpoints.loading import describe_drafter
from amusd.config import EngineConfig
from amusd.drafters.base import Drafter
from amusd.drafters.factory import StartInner, load_drafters
from amusd.errors import ConfigError, PeerLostError
from amusd.files import keep_traceback
from amusd.logs import logger, warn_once
from amusd.protocol.messages import DraftHello, TargetHello
from amusd.runner.model_runner import ModelRunner
from amusd.runtime.devices import claim_device, device_of, free_bytes, link_devices
from amusd.runtime.draft_process import FAILED, TOLD
from amusd.runtime.draft_worker import DraftWorker
from amusd.runtime.hello import BUSY, check_pair, failure_report
from amusd.runtime.remote_drafter import start_inner
from amusd.tracing.recorder import Recorder
from amusd.transport.base import Transport
from amusd.transport.factory import is_removed, listen

IDLE_SECONDS = 1.0


class Offer(NamedTuple):
    """The drafters that a draft has loaded."""

    drafters: Mapping[str, Sequence[Drafter]]
    tokenizer_hash: str
    notes: Sequence[str] = ()


def prepare(config: EngineConfig) -> Offer | None:
    """Load what forked draft processes share; None if each process has to load for itself.

    None on a GPU (no context survives a fork), outside Linux, with an inner drafter on another device, and after an
    error.
    """
    has_others = any(drafter.inner_device is not None for drafter in config.drafters)
    if device_of(config, "draft") != "cpu" or has_others or not sys.platform.startswith("linux"):
        return None
    torch.set_num_threads(1)  # the other threads of a pool would be missing in the fork
    try:
        return load(config)
    except Exception:  # noqa: BLE001 - the draft loads again, and reports it
        logger.debug("the draft does not load", exc_info=True)
        return None


def load(config: EngineConfig, inner: StartInner | None = None) -> Offer:
    """Load the models and make the drafters, which takes seconds on a GPU. Raises any error of either."""
    start, device = time.monotonic(), claim_device(config, "draft")
    loaded = load_drafters(config, device, inner)
    notes = [*loaded.notes, *_shorten(loaded.models, config, device)]
    named = "; ".join(describe_drafter(drafter, config, device) for drafter in config.drafters)
    logger.info("draft: %s, %.1f s", named, time.monotonic() - start)
    with device_errors(device, only_full=True):
        made = {name: make(config.max_num_seqs) for name, make in loaded.factories.items()}
    return Offer(made, loaded.tokenizer_hash, notes)


def _shorten(models: Sequence[ModelRunner], config: EngineConfig, device: str) -> Iterator[str]:
    """Shorten the models' caches to half of the free memory, if `fits_memory`; yield a line for each."""
    for model in models if config.fits_memory else ():
        needed, most = model.cache_bytes(config.max_num_seqs), free_bytes(device) // 2 // len(models)
        if needed > most:
            model.max_length = max(1, model.max_length * most // needed)
            yield f"its {config.max_num_seqs} caches hold {model.max_length} tokens each, in half of the free memory"


@dataclass
class DraftServer:
    """Serves the targets that connect to an address, one at a time."""

    config: EngineConfig
    address: str
    is_own: bool
    """Whether the server belongs to one run: it serves one session, whose target reports failures."""
    last_code: int | None = None
    """Exit code of the previous draft, if any."""
    recorder: Recorder = field(default_factory=partial(Recorder, "draft"))
    """Records all sessions; with `is_own`, the target names the folder of the events."""

    def run(self, prepared: Offer | None = None) -> int:
        """Load unless that has been done, and serve; return the exit code.

        A fork and an own draft serve one target; any other process serves targets until its first failure. If loading
        fails, an own draft tells its target, and any other raises the error.
        """
        torch.set_num_threads(self.config.hardware.num_threads)  # `prepare` has set it to 1
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
                with closing(link):
                    if not self.is_own and self.last_code is None:
                        logger.info("draft: listens at %s", link.address)
                    code = self.serve_target(link, offer)
                self.last_code = code or 0
                if code is not None and (code or self.is_own or prepared is not None):
                    return code

    def serve_target(self, link: Transport, offer: Offer | Exception) -> int | None:
        """Draft for the next target until it is done; return the exit code, or None without a hello."""
        try:
            if (hello := _hello(link)) is None:
                return None
            link.answer_to_others = BUSY
            if self.is_own:
                self.recorder.events_path = hello.events
            if isinstance(offer, Exception):
                raise offer
            chains = tuple(name for name, made in offer.drafters.items() if not made[0].drafts_trees)
            own = DraftHello(hello.incarnation, offer.tokenizer_hash, tuple(offer.drafters), chains, os.getpid())
            check_pair(hello, own)
            link.send(own)
            for note in offer.notes if hello.incarnation == 1 else ():
                warn_once(f"draft: {note}")
            with device_errors(device_of(self.config, "draft"), only_full=True):
                DraftWorker(link, offer.drafters, hello.incarnation, self.recorder).run()
        except Exception as error:  # noqa: BLE001 - the target needs the reason, not only a dead link
            with suppress(PeerLostError):
                link.send(failure_report(error))
            self.recorder.flush()
            return self._failed(error)
        return 0

    def _failed(self, error: Exception) -> int:
        """Report the error if nobody else does; return the exit code. A second failure in a row has no traceback."""
        code = TOLD if isinstance(error, (ConfigError, PeerLostError)) else FAILED
        runs_users_code = any(drafter.factory is not None for drafter in self.config.drafters)
        has_traceback = code == FAILED or (runs_users_code and error.__cause__ is not None)
        if has_traceback and self.recorder.folder is not None:
            keep_traceback(self.recorder.folder.parent, "draft", error)
        if code == FAILED and self.last_code != FAILED:
            traceback.print_exception(error)
        if code != FAILED and not self.is_own:  # the fault of one target
            logger.warning("draft: a target is refused or gone: %s", error)
            return 0
        return code


def _hello(link: Transport) -> TargetHello | None:
    """Wait for a target's hello; None if it leaves or sends something else. Raises `ConfigError`."""
    try:
        while (message := link.receive(IDLE_SECONDS)) is None:
            if link.num_rejected:  # a stranger must not keep the target out
                return None
    except PeerLostError:
        return None
    return message if isinstance(message, TargetHello) else None
