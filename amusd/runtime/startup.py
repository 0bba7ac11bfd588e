"""Loads a target and its ranks from a configuration, and connects it to its draft."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from amusd.checkpoints.building import device_errors
from amusd.checkpoints.loading import check_target, is_fixed, load_target
from amusd.checkpoints.tokenizer import Tokenizer
from amusd.config import EngineConfig
from amusd.errors import ConfigError, PeerError, PeerLostError, first_line
from amusd.huge_pages import use_huge_pages
from amusd.logs import logger
from amusd.models.sharding import ALONE
from amusd.runner.model_runner import ModelRunner
from amusd.runner.process_group import backend_for
from amusd.runtime.connection import Connection
from amusd.runtime.devices import claim_device, device_of, devices_of
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.draft_process import DraftSource
from amusd.runtime.ranks import Follower, Leader, follow
from amusd.runtime.target_worker import TargetWorker
from amusd.runtime.workers import Rendezvous
from amusd.tracing.recorder import Recorder
from amusd.transport.torch_distributed import Backend

_MANY_ROWS = 64


def connect_target(
    config: EngineConfig,
    drafts: DraftSource | None,
    recorder: Recorder,
    running: ExitStack,
    *,
    rendezvous: Rendezvous | None = None,
) -> tuple[TargetWorker, Tokenizer]:
    """Load the target, and connect it to the draft, which loads meanwhile. `drafts`: None for no draft.

    The started parts end with `running`. `rendezvous`: as in `Engine.connect`. Raises `ConfigError` if target and
    draft do not match. If no draft comes for another reason, the target starts alone.
    """
    claim_device(config, "target")
    leader = None
    if (size := config.target_tensor_parallel_size) > 1:
        assert rendezvous is not None, "several ranks need a rendezvous"
        check_target(config)
        leader = Leader(config.transport, rendezvous, size, _backend(config, rendezvous))
        running.callback(leader.close)
    connection = Connection() if drafts is None else Connection.to(drafts, config, running)
    model, tokenizer = load_first_rank(config, leader)
    if drafts is not None:
        try:
            wanted = [each.kind for each in config.drafters if each.address]
            connection.await_first(tokenizer.fingerprint, wanted, recorder.events_path)
        except PeerError as error:
            logger.warning("the target starts without a draft: %s", first_line(error))
            connection.shut_down()
            connection.losses.append(first_line(error))
            drafts.stop()
    client = DraftClient(recorder, connection, 2 * config.transport.delay_ms / 1e3)
    with device_errors(device_of(config, "target"), only_full=True):
        worker = TargetWorker(model, recorder, client, config.max_num_seqs, config.prefix_caching)
        worker.prepare()
    return worker, tokenizer


def _backend(config: EngineConfig, rendezvous: Rendezvous) -> Backend:
    return backend_for(devices_of(config)[:-1], same_machine=rendezvous.store is None)


def load_first_rank(config: EngineConfig, leader: Leader | None) -> tuple[ModelRunner, Tokenizer]:
    """Load the first rank's model, whole or its part, and the tokenizer; wait for the other ranks, if any.

    Raises `ConfigError`, and `PeerError` when a rank fails or does not come.
    """
    device = device_of(config, "target")
    loaded = load_target(config, device, ALONE if leader is None else leader)
    if device == "cpu":
        use_huge_pages()
    if leader is not None:
        leader.await_followers(device, config.startup_timeout_seconds)
    if device == "cpu" and is_fixed(config) and config.max_verify_width > _MANY_ROWS:
        logger.info(
            f"each target pass computes max_verify_width={config.max_verify_width} rows, which is slow on a CPU"
        )
    if (number := config.max_num_seqs) > 1:
        each, size = f"a cache of {loaded[0].max_length} tokens each", loaded[0].cache_bytes(number) / 1e6
        logger.info(f"up to {number} answers at a time, with {each}: {size:.0f} MB (max_num_seqs, max_model_len)")
    return loaded


def run_follower(config: EngineConfig, rank: int, rendezvous: Rendezvous) -> None:
    """Run rank `rank` of the target: load its part of the model, and compute the leader's commands.

    Reports errors to the leader; raises them, too, except a user's mistake and a lost rank.
    """
    torch.set_num_threads(config.hardware.num_threads)
    size = config.target_tensor_parallel_size
    follower = Follower(config.transport, rendezvous, rank, size, _backend(config, rendezvous))
    try:
        device = claim_device(config, "target", rank)
        model, _ = load_target(config, device, ranks=follower)
        follower.ready(device, config.startup_timeout_seconds)
        with device_errors(device, only_full=True):
            follow(model, follower.commands())
    except BaseException as error:
        follower.close(error)
        if not isinstance(error, (PeerLostError, ConfigError)):  # the first rank reports these
            raise
    else:
        follower.close()
