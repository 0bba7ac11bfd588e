"""Starts a draft worker from a configuration, and connects a target worker."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from amusd.checkpoints.building import device_errors
from amusd.checkpoints.loading import check_target, describe_drafter, load_target
from amusd.checkpoints.tokenizer import Tokenizer
from amusd.config import DrafterConfig, EngineConfig, TransportConfig
from amusd.drafters.base import DrafterFactory
from amusd.drafters.factory import LoadedDrafters, StartInner, load_drafters
from amusd.errors import ConfigError, PeerError, PeerLostError, first_line
from amusd.huge_pages import use_huge_pages
from amusd.logs import logger, warn_once
from amusd.models.sharding import ALONE
from amusd.protocol.messages import Hello
from amusd.runner.model_runner import ModelRunner
from amusd.runner.process_group import backend_for
from amusd.runner.rank_commands import follow
from amusd.runner.rendezvous import Rendezvous
from amusd.runtime.connection import Connection
from amusd.runtime.devices import check_devices, claim_device, device_of, devices_of, link_devices
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.draft_process import DraftProcess
from amusd.runtime.draft_restart import DraftRestart, DraftSource
from amusd.runtime.draft_worker import DraftWorker
from amusd.runtime.handshake import await_hello
from amusd.runtime.ranks import Follower, Leader
from amusd.runtime.remote_drafter import RemoteDrafter
from amusd.runtime.target_worker import TargetWorker
from amusd.tracing.recorder import Recorder
from amusd.transport.base import Transport
from amusd.transport.factory import listen
from amusd.transport.torch_distributed import Backend

_MANY_ROWS = 64


def connect_target(
    config: EngineConfig,
    drafts: DraftSource | None,
    recorder: Recorder,
    running: ExitStack,
    *,
    meeting: Rendezvous | None = None,
) -> tuple[TargetWorker, Tokenizer]:
    """Listen, tell the draft where, load the target meanwhile, and shake hands. `drafts`: None for no draft.

    What is started ends with `running`. `meeting`: as of `Engine.connect`. Raises `ConfigError` when the pair cannot
    work together; where no draft comes for another reason, the target is alone.
    """
    claim_device(config, "target")
    leader = None
    if (size := config.target_tensor_parallel_size) > 1:
        assert meeting is not None, "whoever starts the other ranks says where they meet"
        check_target(config)
        leader = Leader(config.transport, meeting, size, _backend(config, meeting))
        running.callback(leader.close)
    can_repeat = config.transport.kind not in ("gloo", "nccl")  # which make no second link
    restart = None if drafts is None else start_draft(config, drafts, running, can_repeat=can_repeat)
    model, tokenizer = load_with_followers(config, leader)
    connection = Connection()
    if restart is not None:
        connection = _connection_to_first(restart, tokenizer.fingerprint)
        running.callback(connection.shut_down)
    client = DraftClient(recorder, connection, 2 * config.transport.delay_ms / 1e3)
    with device_errors(device_of(config, "target"), only_full=True):
        worker = TargetWorker(model, recorder, client, config.max_num_seqs, config.prefix_caching)
        worker.prepare()
    return worker, tokenizer


def start_draft(
    config: EngineConfig, drafts: DraftSource, running: ExitStack, *, can_repeat: bool = True
) -> DraftRestart:
    """Have the first of `drafts` start, without waiting; they end with `running`."""
    running.callback(drafts.stop)
    make_link = partial(listen, config.transport, devices=link_devices(config))
    restart = DraftRestart(drafts, make_link, config.startup_timeout_seconds, can_repeat=can_repeat)
    running.callback(restart.close)
    restart.start()
    return restart


def _connection_to_first(restart: DraftRestart, tokenizer_hash: str) -> Connection:
    """The connection to the first draft; where it fails, one that has lost it, and a line. Raises `ConfigError`."""
    try:
        return Connection(*restart.first(tokenizer_hash), restart if restart.can_repeat else None)
    except PeerError as error:
        logger.warning("the target starts without a draft: %s", first_line(error))
        restart.close()
        restart.source.stop()
        return Connection(losses=[first_line(error)])


def _backend(config: EngineConfig, meeting: Rendezvous) -> Backend:
    return backend_for(devices_of(config)[:-1], same_machine=meeting.store is None)


def load_with_followers(config: EngineConfig, leader: Leader | None) -> tuple[ModelRunner, Tokenizer]:
    """The target's model and tokenizer; with a leader, its part of the model, once all ranks have theirs.

    Raises `ConfigError`, and `PeerError` when a rank fails or does not come.
    """
    device = device_of(config, "target")
    loaded = load_target(config, device, ALONE if leader is None else leader)
    if device == "cpu":
        use_huge_pages()
    if leader is not None:
        leader.await_followers(device, config.startup_timeout_seconds)
    if device == "cpu" and config.verify_width == "fixed" and config.max_verify_width > _MANY_ROWS:
        logger.info(
            f"each target pass computes max_verify_width={config.max_verify_width} rows, which is slow on a CPU"
        )
    if (number := config.max_num_seqs) > 1:
        each, size = f"a cache of {loaded[0].max_length} tokens each", cache_bytes(loaded[0], number) / 1e6
        logger.info(f"up to {number} answers at a time, with {each}: {size:.0f} MB (max_num_seqs, max_model_len)")
    return loaded


def cache_bytes(model: ModelRunner, max_num_seqs: int) -> int:
    """Memory of so many caches of the greatest length. Computes a pass."""
    cache = model.new_cache(1)
    memory = cache.memory
    model.prefill((0,), cache)  # keys and values are allocated by the first pass, which knows their shapes
    return max_num_seqs * model.max_length * memory.nbytes // memory.num_slots


def run_follower(config: EngineConfig, rank: int, meeting: Rendezvous) -> None:
    """Be another rank of the target: load a part of the model, and compute the first one's commands.

    Raises what it reported, unless it is the user's mistake or another rank's.
    """
    torch.set_num_threads(config.hardware.num_threads)
    size = config.target_tensor_parallel_size
    follower = Follower(config.transport, meeting, rank, size, _backend(config, meeting))
    try:
        device = claim_device(config, "target", rank)
        model, _ = load_target(config, device, ranks=follower)
        follower.ready(device, config.startup_timeout_seconds)
        with device_errors(device, only_full=True):
            follow(model, follower.commands())
    except BaseException as error:
        follower.close(error)
        if not isinstance(error, (PeerLostError, ConfigError)):  # which the first rank says
            raise
    else:
        follower.close()


def prepare_draft(config: EngineConfig) -> LoadedDrafters | None:
    """Load what forked draft processes share; None where each has to load for itself.

    It has to on a GPU, which is lost in a fork, with an inner drafter elsewhere, and where a loading failure must be
    reported.
    """
    device = device_of(config, "draft")
    has_others = any(drafter.inner_device is not None for drafter in config.drafters)
    if device != "cpu" or has_others or not sys.platform.startswith("linux"):
        return None
    torch.set_num_threads(1)  # the other threads of a pool would be missing in the fork
    try:
        return _load_drafters(config, device)
    except Exception:  # noqa: BLE001 - whatever it is, it comes again where it can be reported
        return None


def _load_drafters(config: EngineConfig, device: str, start_inner: StartInner | None = None) -> LoadedDrafters:
    start = time.monotonic()
    loaded = load_drafters(config, device, start_inner)
    named = "; ".join(describe_drafter(drafter, config, device) for drafter in config.drafters)
    logger.info("draft: %s, %.1f s", named, time.monotonic() - start)
    return loaded


def serve_draft(
    config: EngineConfig, link: Transport, recorder: Recorder, incarnation: int, drafters: LoadedDrafters | None
) -> None:
    """The draft process: load unless `prepare_draft` has, shake hands, draft until the target is done."""
    torch.set_num_threads(config.hardware.num_threads)  # which `prepare_draft` has set to another
    with ExitStack() as others:
        device = claim_device(config, "draft")
        drafters = drafters or _load_drafters(config, device, partial(start_inner, config, others))
        for note in drafters.notes if incarnation == 1 else ():
            warn_once(f"draft: {note}")
        with device_errors(device, only_full=True):
            # before the target is told that they are ready: on a GPU it takes seconds
            made = {name: make(config.max_num_seqs) for name, make in drafters.factories.items()}
            hello = Hello(incarnation, drafters.tokenizer_hash, tuple(made))
            await_hello(link, hello, config.startup_timeout_seconds)
            DraftWorker(link, made, incarnation, recorder).run()


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
    drafts = start_draft(config, DraftProcess(config), running, can_repeat=False)
    connection = Connection(*drafts.first(tokenizer.fingerprint))
    running.callback(connection.shut_down)
    client = DraftClient(Recorder("target"), connection)
    return lambda number: [RemoteDrafter(client, stage.kind, middle.num_ids) for _ in range(number)]
