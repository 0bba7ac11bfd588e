"""Ranks that meet, compute together, and lose each other. Followers are threads here; processes are in tests/launch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from memory_link import of_another_version
from models.blocks import Second, random_ids
from models.linked_ranks import DEADLINE_SECONDS, come, lead
from models.paths import tree_rows
from models.test_decoder import Case, lean_model, stock_model
from passes import forward

from amusd.errors import ConfigError, PeerError, PeerProtocolError, RankLostError
from amusd.models.kv_cache import KVCache, KVMemory
from amusd.models.numerics import Numerics
from amusd.models.passes import RankCommand, Wipe
from amusd.models.sharding import ALONE, Ranks
from amusd.protocol.messages import Ready
from amusd.runner.graphs import Replay
from amusd.runner.model_runner import ModelRunner, extend
from amusd.runtime.ranks import Follower, Leader, command_encoder, follow
from amusd.runtime.workers import Rendezvous

Work = Callable[[Follower], object]
STOCK = stock_model(Case("Qwen3Config", {"num_attention_heads": 8, "num_key_value_heads": 4}))


def following(make: Callable[[Follower], ModelRunner]) -> Work:
    def work(follower: Follower) -> None:
        model = make(follower)
        follower.ready("cpu", DEADLINE_SECONDS)
        follow(model, follower.commands())

    return work


@contextmanager
def followed(folder: Path, size: int, work: Work) -> Iterator[tuple[Leader, list[Future[None]]]]:
    """Yields a leader, and a future for each follower, which runs `work` on a thread."""

    def run(rank: int) -> None:
        follower = come(folder, rank, size)
        try:
            work(follower)
        except BaseException as error:
            follower.close(error)
            raise
        follower.close()

    with ThreadPoolExecutor(size) as pool, closing(lead(folder, size)) as leader:
        yield leader, [pool.submit(run, rank) for rank in range(1, size)]


def fail(*_: object) -> None:
    raise ValueError("out of paper")


def test_a_follower_that_fails_amid_a_pass_ends_it_with_the_reason(tmp_path: Path) -> None:
    def work(follower: Follower) -> None:
        follower.ready("cpu", DEADLINE_SECONDS)
        fail(next(follower.commands()))

    with followed(tmp_path, 2, work) as (leader, _):
        model = lean_model(STOCK, ranks=leader)
        leader.await_followers("cpu", DEADLINE_SECONDS)
        with pytest.raises(PeerError, match=r"^rank 1 of the target failed: ValueError: out of paper$"):
            forward(model, [1, 2], model.new_cache(8))


def test_a_leader_that_fails_amid_a_pass_ends_the_followers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with followed(tmp_path, 2, following(lambda ranks: lean_model(STOCK, ranks=ranks))) as (leader, followers):
        model = lean_model(STOCK, ranks=leader)
        leader.await_followers("cpu", DEADLINE_SECONDS)
        monkeypatch.setattr(leader, "gather", fail)
        with pytest.raises(ValueError, match="out of paper"):
            forward(model, [1, 2], model.new_cache(8))
        leader.close()
        assert isinstance(followers[0].exception(DEADLINE_SECONDS), RankLostError)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError])
def test_no_pass_follows_one_that_the_leader_broke_off(
    failure: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with followed(tmp_path, 2, following(lambda ranks: lean_model(STOCK, ranks=ranks))) as (leader, followers):
        model = lean_model(STOCK, ranks=leader)
        leader.await_followers("cpu", DEADLINE_SECONDS)
        cache = model.new_cache(8)
        with monkeypatch.context() as patch:
            patch.setattr(leader, "gather", Mock(side_effect=failure))
            with pytest.raises(failure):
                forward(model, [1, 2], cache)
        with pytest.raises(RankLostError, match="out of step after a failed pass"):
            forward(model, [3, 4], cache)
        assert isinstance(followers[0].exception(DEADLINE_SECONDS), RankLostError)


@pytest.mark.parametrize(
    ("mistake", "expected", "message"),
    [
        (ConfigError("device cuda:1: no such device"), ConfigError, "^device cuda:1: no such device$"),
        (ValueError("a bug"), PeerError, "^rank 1 of the target failed: ValueError: a bug$"),
    ],
)
def test_a_follower_that_cannot_load_is_heard_at_once(
    tmp_path: Path, mistake: Exception, expected: type[Exception], message: str
) -> None:
    with followed(tmp_path, 2, lambda rank: rank.close(mistake)) as (leader, _), pytest.raises(expected, match=message):
        leader.await_followers("cpu", DEADLINE_SECONDS)


def test_ranks_that_would_compute_in_other_dtypes_are_refused(tmp_path: Path) -> None:
    """NCCL would take the bytes of one 16-bit dtype for those of the other."""

    def make(ranks: Ranks, dtype: str) -> ModelRunner:
        model = lean_model(STOCK, ranks=ranks)
        model.options = replace(model.options, dtype=dtype)
        return model

    with followed(tmp_path, 2, following(lambda ranks: make(ranks, "float16"))) as (leader, followers):
        model = make(leader, "bfloat16")
        leader.await_followers("cpu", DEADLINE_SECONDS)
        cache = model.new_cache(8)
        model.prepare(cache)
        assert isinstance(followers[0].exception(DEADLINE_SECONDS), ConfigError)
        with pytest.raises(ConfigError, match=r"^target\.dtype=auto: bfloat16 on rank 0, float16 on rank 1"):
            forward(model, [1, 2], cache)


def test_a_follower_of_another_version_is_not_waited_for(tmp_path: Path) -> None:
    with closing(come(tmp_path, 1, 2)) as follower, closing(lead(tmp_path, 2)) as leader:
        follower._link.send_frame(of_another_version(Ready()))
        with pytest.raises(ConfigError, match="rank 1 of the target: the peer speaks protocol version 11"):
            leader.await_followers("cpu", DEADLINE_SECONDS)


def test_a_follower_whose_process_ends_before_it_has_come_is_not_waited_for(tmp_path: Path) -> None:
    rendezvous = Rendezvous(str(tmp_path))
    rendezvous.failure = Mock(return_value=RankLostError("killed by signal 9"))  # type: ignore[method-assign]
    with closing(lead(tmp_path, 2, rendezvous=rendezvous)) as leader, pytest.raises(RankLostError, match="by signal 9"):
        leader.await_followers("cpu", DEADLINE_SECONDS)


def test_a_memory_that_the_leader_has_no_more_is_dropped_by_its_followers() -> None:
    encode, passes = command_encoder(), list[RankCommand]()
    memories: list[weakref.ref[KVMemory]] = []

    def new_caches(number: int = 1, capacity: int = 9, spare: int = 0) -> list[KVCache]:
        return [KVCache(KVMemory(capacity, torch.float32), capacity=capacity, allocated=capacity, spare=spare)]

    def frames() -> Iterator[bytes]:
        for _ in range(2):
            yield encode(Wipe(new_caches()[0]), None)
            memories.append(weakref.ref(passes.pop().cache.memory))
        gc.collect()
        assert memories[0]() is None

    follow(Mock(new_caches=new_caches, compute=lambda work, _: passes.append(work)), frames())
    assert len(memories) == 2


def test_a_message_that_is_no_pass_is_an_error() -> None:
    with pytest.raises(PeerProtocolError, match=r"^rank 0 of the target: "):
        follow(Mock(), [b"no pass"])


def test_numbers_that_are_not_finite_are_wiped_on_every_rank(tmp_path: Path) -> None:
    """A masked value is multiplied by zero, which gives NaN if it is infinite."""

    def overflow(model: Any) -> None:
        model.get_input_embeddings().weight.data[5] = torch.inf

    def make(ranks: Ranks) -> ModelRunner:
        return lean_model(STOCK, change=overflow, ranks=ranks)

    with followed(tmp_path, 2, following(make)) as (leader, _):
        model = make(leader)
        leader.await_followers("cpu", DEADLINE_SECONDS)
        cache = model.new_cache(8)
        assert not forward(model, [3, 5, 3], cache).logits.isfinite().all()
        cache.truncate(0)
        model.wipe(cache)
        assert forward(model, [3, 4], cache).logits.isfinite().all()


def test_commands_do_not_grow_with_the_sequence() -> None:
    encode, ranks, sizes = command_encoder(), Ranks(0, 1), list[int]()
    ranks.announce = lambda *command: sizes.append(len(encode(*command)))  # type: ignore[method-assign]
    model = model_on(ranks, RULES["fixed"], Captures())
    cache = model.new_cache(100)
    for _ in range(2):
        model.prefill(random_ids(20), cache)
        forward(model, [5, 6, 7], cache, parents=[0, 0])
    assert sizes[1] == sizes[-1]


STEPS, SECOND = 3, Second(0)
RULES = {
    "fixed": Numerics(width=4, fixed=True, has_borders=False, prefill_chunk=32, num_tracks=2),
    "bucketed": Numerics(width=4, fixed=False, has_borders=False, prefill_chunk=32),
}


class Captures:
    """A `Capture` that runs work as `graph_capture` does, and notes the graphs that were captured and replayed."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.replayed: list[int] = []

    def __call__(self, work: Callable[[], None]) -> Replay:
        number = self.num_graphs
        self.num_graphs += 1
        work()
        work()

        def replay() -> None:
            self.replayed.append(number)
            work()

        return replay


def model_on(ranks: Ranks, rule: Numerics, captures: Captures) -> ModelRunner:
    return lean_model(STOCK, rule, ranks=ranks, capture=captures, tokens_per_step=STEPS)


def decoded(model: ModelRunner) -> list[list[int]]:
    """The tokens that chains with rollbacks, blocks, paths and trees choose."""
    prompt, block = random_ids(11), random_ids(3, seed=4)
    cache = model.new_cache(60)
    model.prepare(cache, (SECOND,))
    model.prepare(cache, steps=STEPS)
    model.prefill(prompt[:-1], cache)
    chosen = [extend(model, prompt[-1:], cache, 8)]
    cache.truncate(13)
    chosen.append(forward(model, block, cache).choose())
    chosen.append(forward(model, block[:1], cache).logits.argmax(-1).tolist())
    chosen.append(extend(model, block[:2], cache, 4))
    chosen.append(forward(model, block[:2], cache, SECOND.wanted(2)).choose())
    if model.numerics.tracks_at(cache.length) > 1:
        chosen.append(forward(model, block, cache, parents=[0, 0]).choose())
        model.keep([0, 2], cache)
    chosen.append(extend(model, block[:1], cache, 5))
    cache.truncate(0)
    model.prefill(random_ids(58, seed=6), cache)
    chosen.append(extend(model, block[:1], cache, 2))  # in a replay that passes the end of the cache
    tree_cache = model.new_cache(16, spare=16)
    model.prepare(tree_cache)
    model.prefill(prompt, tree_cache)
    logits = model.run([tree_rows(block[:2], np.arange(11), [[17], [14]], tree_cache)])[0].logits
    return [*chosen, logits.argmax(-1).tolist()]


@pytest.mark.parametrize(("rule", "size"), [("fixed", 3), ("bucketed", 2)])
def test_ranks_capture_and_replay_the_same_in_order_and_choose_as_one(tmp_path: Path, rule: str, size: int) -> None:
    captures = [Captures() for _ in range(size)]

    def make(ranks: Ranks) -> ModelRunner:
        return model_on(ranks, RULES[rule], captures[ranks.rank])

    alone = Captures()
    expected = decoded(model_on(ALONE, RULES[rule], alone))
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "these answers are too simple to tell apart"
    with followed(tmp_path, size, following(make)) as (leader, followers):
        model = make(leader)
        leader.await_followers("cpu", DEADLINE_SECONDS)
        assert decoded(model) == expected
    for follower in followers:
        follower.result(DEADLINE_SECONDS)
    assert [each.num_graphs for each in captures] == [alone.num_graphs] * size
    assert [each.replayed for each in captures] == [alone.replayed] * size
    assert alone.replayed
