"""Ranks beyond this machine: through a tunnel and at an address they compute as they do here. Followers are threads."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from models.blocks import random_ids
from models.test_decoder import Case, lean_model, stock_model

from amusd.errors import RankLostError
from amusd.models.process_group import EXCHANGE_SECONDS, backend_for
from amusd.models.rank_commands import follow
from amusd.models.ranks import COMMANDS, Follower, Leader
from amusd.transport.curve import read_keys, write_keys
from amusd.transport.tunnel import Tunnel
from amusd.types import Role

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="127.0.0.2 is up on Linux")
HOST = "127.0.0.2"
SECONDS = 20.0
STOCK = stock_model(Case("Qwen3Config", {"num_attention_heads": 8, "num_key_value_heads": 4}))


def come_and_follow(address: str, rank: int) -> None:
    follower = Follower(address, rank, 3, host=HOST)
    model = lean_model(STOCK, ranks=follower)
    follower.ready("cpu", SECONDS)
    follow(model, follower.commands())
    follower.close()


def test_ranks_here_and_beyond_a_tunnel_compute_the_tokens_of_one(tmp_path: Path) -> None:
    token_ids = random_ids(40)
    alone = lean_model(STOCK)
    cache = alone.new_cache(100)
    alone.prefill(token_ids[:-1], cache)
    expected = alone.extend(token_ids[-1:], cache, 20)
    write_keys(tmp_path / "keys")
    ours, theirs = (read_keys(tmp_path / "keys", role) for role in Role)
    with (
        closing(Leader(3, host=HOST)) as leader,
        ThreadPoolExecutor(2) as pool,
        closing(Tunnel.listen(HOST, Path(leader.address) / COMMANDS, ours)) as here,
        closing(Tunnel.connect(here.address, tmp_path / COMMANDS, theirs)),
    ):
        followers = [
            pool.submit(come_and_follow, address, rank)
            for rank, address in enumerate((leader.address, str(tmp_path)), start=1)
        ]
        model = lean_model(STOCK, ranks=leader)
        leader.await_followers("cpu", SECONDS)
        cache = model.new_cache(100)
        model.prefill(token_ids[:-1], cache)
        assert model.extend(token_ids[-1:], cache, 20) == expected
        leader.close()
        for follower in followers:
            follower.result(SECONDS)


def test_an_exchange_ends_with_the_connection_for_commands_where_gloos_own_ends_with_nothing() -> None:
    """As where a cable is cut: the tunnel finds out by heartbeats, and gloo would wait for its own deadline."""
    is_over = threading.Event()

    def come_and_be_lost(address: str) -> None:
        follower = Follower(address, 1, 2, host=HOST)
        follower.ready("cpu", SECONDS)
        time.sleep(0.2)  # the leader waits in its exchange
        follower._leader.close()
        is_over.wait(SECONDS)
        follower.close()

    with closing(Leader(2, host=HOST)) as leader, ThreadPoolExecutor(1) as pool:
        lost = pool.submit(come_and_be_lost, leader.address)
        leader.await_followers("cpu", SECONDS)
        start = time.monotonic()
        with pytest.raises(RankLostError, match="rank 1 of the target is gone"):
            leader.sum(torch.zeros(1, 4))
        assert time.monotonic() - start < EXCHANGE_SECONDS / 2
        is_over.set()
        lost.result(SECONDS)


def test_gpus_of_the_same_name_are_two_on_two_machines() -> None:
    assert backend_for(("cuda:0", "cuda:0")) == "gloo"
    assert backend_for(("cuda:0", "cuda:0"), over_nodes=True) == "nccl"
    assert backend_for(("cuda:0", "cpu"), over_nodes=True) == "gloo"
