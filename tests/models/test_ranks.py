"""Ranks that meet, compute together, and lose each other. Followers are threads here; processes are in tests/launch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from models.blocks import random_ids
from models.linked_ranks import DEADLINE_SECONDS, come, lead
from models.paths import decoded_both_ways
from models.test_decoder import Case, lean_model, stock_model
from passes import forward

from amusd.errors import ConfigError, PeerFailedError, PeerProtocolError, RankLostError
from amusd.models.cached_model import extend
from amusd.models.kv_cache import KVCache, KVMemory
from amusd.models.numerics import Numerics
from amusd.models.passes import Pass, Rows
from amusd.models.process_group import backend_for
from amusd.models.rank_commands import PassEncoder, follow
from amusd.runtime.ranks import Leader

STOCK = stock_model(Case("Qwen3Config", {"num_attention_heads": 8, "num_key_value_heads": 4}))


def follow_at(folder: Path, rank: int, size: int, rule: Numerics | None = None) -> list[int]:
    """A follower's life; returns the cache lengths that its passes started from."""
    follower = come(folder, rank, size)
    starts: list[int] = []

    try:
        model = lean_model(STOCK, *([] if rule is None else [rule]), ranks=follower)
        compute = model.compute

        def spy(work: Pass) -> object:
            starts.append(work.rows[0].cache.length)
            return compute(work)

        model.compute = spy  # type: ignore[assignment]  # a spy
        follower.ready("cpu", DEADLINE_SECONDS)
        follow(model, follower.commands())
    except BaseException as error:
        follower.close(error)
        raise
    follower.close()
    return starts


@contextmanager
def meeting(
    folder: Path, size: int, life: Callable[[Path, int, int], object] = follow_at
) -> Iterator[tuple[Leader, list[Future[object]]]]:
    """A leader whose followers are on their way."""
    leader = lead(folder, size)
    with ThreadPoolExecutor(size) as pool:
        try:
            yield leader, [pool.submit(life, folder, rank, size) for rank in range(1, size)]
        finally:
            leader.close()


def test_followers_do_each_pass_of_the_leader_and_end_with_it(tmp_path: Path) -> None:
    token_ids = random_ids(40)
    alone = lean_model(STOCK)
    cache = alone.new_cache(100)
    alone.prefill(token_ids[:-1], cache)
    expected = extend(alone, token_ids[-1:], cache, 20)
    with meeting(tmp_path, 2) as (leader, followers):
        model = lean_model(STOCK, ranks=leader)
        leader.await_followers("cpu", DEADLINE_SECONDS)
        cache = model.new_cache(100)
        model.prefill(token_ids[:-1], cache)
        assert extend(model, token_ids[-1:], cache, 20) == expected
        other = model.new_cache(50)  # a second sequence, and then a rollback of the first
        model.prefill(random_ids(30, seed=3), other)
        cache.truncate(39)
        assert extend(model, token_ids[-1:], cache, 20) == expected
    # two chunks of the prompt, a pass a token, a chunk of the other sequence, and the answer again
    assert followers[0].result(DEADLINE_SECONDS) == [0, 32, *range(39, 59), 0, *range(39, 59)]


def test_rows_kept_of_several_paths_are_kept_on_every_rank(tmp_path: Path) -> None:
    """Bit for bit the logits of one row after the other on the same ranks: the followers' keys move as the leader's."""
    rule = Numerics(width=8, fixed=True, border=64, prefill_chunk=64, num_tracks=3)
    with meeting(tmp_path, 2, partial(follow_at, rule=rule)) as (leader, followers):
        model = lean_model(STOCK, rule, ranks=leader)
        leader.await_followers("cpu", DEADLINE_SECONDS)
        expected, found = decoded_both_ways(model)
    followers[0].result(DEADLINE_SECONDS)
    assert torch.equal(found, expected)


def test_a_follower_that_goes_amid_a_pass_is_named(tmp_path: Path) -> None:
    def life(folder: Path, rank: int, size: int) -> None:
        if rank == 1:
            follow_at(folder, rank, size)
        follower = come(folder, rank, size)
        follower.ready("cpu", DEADLINE_SECONDS)
        next(follower.commands())
        follower.close()

    with meeting(tmp_path, 3, life) as (leader, followers):
        model = lean_model(STOCK, ranks=leader)
        leader.await_followers("cpu", DEADLINE_SECONDS)
        with pytest.raises(RankLostError, match=r"^rank 2 of the target is gone$"):
            forward(model, [1, 2], model.new_cache(8))
        assert isinstance(followers[0].exception(DEADLINE_SECONDS), RankLostError)


def test_a_follower_that_fails_amid_a_pass_ends_it_with_the_reason(tmp_path: Path) -> None:
    def life(folder: Path, rank: int, size: int) -> None:
        follower = come(folder, rank, size)
        follower.ready("cpu", DEADLINE_SECONDS)
        next(follower.commands())
        follower.close(ValueError("out of paper"))

    with meeting(tmp_path, 2, life) as (leader, _):
        model = lean_model(STOCK, ranks=leader)
        leader.await_followers("cpu", DEADLINE_SECONDS)
        with pytest.raises(PeerFailedError, match=r"^rank 1 of the target failed: out of paper$"):
            forward(model, [1, 2], model.new_cache(8))


def test_a_leader_that_fails_amid_a_pass_ends_the_followers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_part: torch.Tensor) -> None:
        raise ValueError("out of paper")

    with meeting(tmp_path, 2) as (leader, followers):
        model = lean_model(STOCK, ranks=leader)
        leader.await_followers("cpu", DEADLINE_SECONDS)
        monkeypatch.setattr(leader._met, "sum", fail)
        with pytest.raises(ValueError, match="out of paper"):
            forward(model, [1, 2], model.new_cache(8))
        leader.close()
        assert isinstance(followers[0].exception(DEADLINE_SECONDS), RankLostError)


@pytest.mark.parametrize(
    ("mistake", "expected", "message"),
    [
        (ConfigError("device cuda:1: no such device"), ConfigError, "^device cuda:1: no such device$"),
        (ValueError("a bug"), PeerFailedError, "^rank 1 of the target failed: a bug$"),
    ],
)
def test_a_follower_that_cannot_load_is_heard_at_once(
    tmp_path: Path, mistake: Exception, expected: type[Exception], message: str
) -> None:
    def life(folder: Path, rank: int, size: int) -> None:
        come(folder, rank, size).close(mistake)

    with meeting(tmp_path, 2, life) as (leader, _), pytest.raises(expected, match=message):
        leader.await_followers("cpu", DEADLINE_SECONDS)


def test_a_follower_whose_process_ends_before_it_has_come_is_not_waited_for(tmp_path: Path) -> None:
    gone = RankLostError("rank 1 of the target (pid 7) was killed by signal 9")
    leader = lead(tmp_path, 2, failure=lambda *_: gone)
    with pytest.raises(RankLostError, match="killed by signal 9"):
        leader.await_followers("cpu", DEADLINE_SECONDS)
    leader.close()


class Follower:
    """Notes what is computed."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []

    def new_caches(self, number: int, capacity: int, *, spare: int) -> list[KVCache]:
        return [KVCache(KVMemory(capacity, torch.float32), capacity=capacity, allocated=capacity, spare=spare)]

    def compute(self, work: Pass) -> None:
        self.passes.append(work)


def test_a_memory_that_the_leader_has_no_more_is_dropped_by_its_followers() -> None:
    encoder, follower = PassEncoder(), Follower()

    def frames() -> Iterator[bytes]:
        for _ in range(2):
            yield encoder.encode(Pass([Rows([1], cache) for cache in Follower().new_caches(1, 9, spare=0)]))
            memories.append(weakref.ref(follower.passes.pop().rows[0].cache.memory))
        gc.collect()
        assert memories[0]() is None

    memories: list[weakref.ref[KVMemory]] = []
    follow(follower, frames())  # type: ignore[arg-type]  # a double


def test_a_message_that_is_no_pass_is_an_error() -> None:
    with pytest.raises(PeerProtocolError, match=r"^rank 0 of the target: "):
        follow(Follower(), [b"no pass"])  # type: ignore[arg-type]  # a double


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        (("cpu", "cpu"), "gloo"),
        (("cuda:0", "cuda:1"), "nccl"),
        (("cuda:0", "cuda:0"), "gloo"),
        (("cuda:0", "cpu"), "gloo"),
    ],
)
def test_nccl_connects_ranks_that_have_a_gpu_each(devices: tuple[str, ...], backend: str) -> None:
    assert backend_for(devices) == backend
