"""Captured passes of several ranks, with the capture left out: the same captures and replays on each, in one order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from models.blocks import random_ids
from models.linked_ranks import DEADLINE_SECONDS, come, lead
from models.paths import tree_rows
from models.test_decoder import Case, lean_model, stock_model
from models.thread_ranks import ThreadRanks
from passes import forward
from torch import Tensor

from amusd.errors import RankLostError
from amusd.models.cached_model import CachedModel, extend
from amusd.models.graphs import Replay
from amusd.models.numerics import Numerics
from amusd.models.passes import SamplerRows
from amusd.models.rank_commands import follow
from amusd.models.sharding import ALONE, Ranks

STEPS = 3
STOCK = stock_model(Case("Qwen3Config", {"num_attention_heads": 8, "num_key_value_heads": 4}))
RULES = {
    "fixed": Numerics(width=4, fixed=True, border=None, prefill_chunk=32, num_tracks=2),
    "bucketed": Numerics(width=4, fixed=False, border=None, prefill_chunk=32),
}


class Captures:
    """A `Capture` that runs work as `CudaGraphs` does, and notes what was captured and replayed."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._num_graphs = 0

    def __call__(self, work: Callable[[], None]) -> Replay:
        number = self._num_graphs
        self._num_graphs += 1
        self.events.append(f"capture {number}")
        work()
        work()

        def replay() -> None:
            self.events.append(f"replay {number}")
            work()

        return replay


class Best:
    """The second best column of each row, among its outputs. A `Sampler`."""

    level = 0
    num_inputs = 1
    num_outputs = 1
    neutral = np.zeros(1, dtype=np.int64)

    def compute(self, logits: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        best = logits.topk(2, dim=1).indices
        return best[:, 0], best[:, 1:].int() + inputs.int()


BEST = Best()


def model_on(ranks: Ranks, rule: Numerics, captures: Captures) -> CachedModel:
    return lean_model(STOCK, rule, ranks=ranks, capture=captures, tokens_per_step=STEPS)


def decoded(model: CachedModel) -> list[list[int]]:
    """What chains with rollbacks, blocks, paths and trees choose."""
    prompt, block = random_ids(11), random_ids(3, seed=4)
    cache = model.new_cache(60)
    model.prepare(cache, (BEST,))
    model.prepare(cache, steps=STEPS)
    model.prefill(prompt[:-1], cache)
    chosen = [extend(model, prompt[-1:], cache, 8)]
    cache.truncate(13)
    chosen.append(forward(model, block, cache).choose())
    chosen.append(forward(model, block[:1], cache).logits.argmax(-1).tolist())
    chosen.append(extend(model, block[:2], cache, 4))
    outputs = forward(model, block[:2], cache, SamplerRows(BEST, np.zeros((2, 1), dtype=np.int64))).outputs
    assert outputs is not None
    chosen.append(outputs[:, 0].tolist())
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


def test_what_the_device_has_computed_without_a_lost_rank_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RankLostError("rank 1 of the target is gone")

    ranks = ThreadRanks(0, [None], threading.Barrier(1))
    model = model_on(ranks, RULES["fixed"], Captures())
    monkeypatch.setattr(ranks, "check", lost)
    cache = model.new_cache(16)
    for compute in (lambda: forward(model, [5], cache).choose(), lambda: extend(model, [5], cache, STEPS)):
        with pytest.raises(RankLostError, match=r"^rank 1 of the target is gone$"):
            compute()
    assert cache.length == 0


@pytest.mark.parametrize(("rule", "size"), [("fixed", 3), ("bucketed", 2)])
def test_ranks_capture_and_replay_the_same_in_one_order_and_choose_what_one_rank_does(
    tmp_path: Path, rule: str, size: int
) -> None:
    captures = [Captures() for _ in range(size)]

    def come_and_follow(rank: int) -> None:
        follower = come(tmp_path, rank, size)
        try:
            model = model_on(follower, RULES[rule], captures[rank])
            follower.ready("cpu", DEADLINE_SECONDS)
            follow(model, follower.commands())
        except BaseException as error:
            follower.close(error)
            raise
        follower.close()

    alone = Captures()
    expected = decoded(model_on(ALONE, RULES[rule], alone))
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "these answers are too simple to tell apart"
    leader = lead(tmp_path, size)
    with ThreadPoolExecutor(size) as pool:
        followers = [pool.submit(come_and_follow, rank) for rank in range(1, size)]
        try:
            model = model_on(leader, RULES[rule], captures[0])
            leader.await_followers("cpu", DEADLINE_SECONDS)
            assert decoded(model) == expected
        finally:
            leader.close()
        for follower in followers:
            follower.result(DEADLINE_SECONDS)
    events = captures[0].events
    assert events == alone.events, "ranks capture something else than one rank"
    assert [other.events for other in captures[1:]] == [events] * (size - 1)
    prepared = [event for event in events if event.startswith("capture")]
    assert events[0] == "capture 0"
    assert any(event.startswith("replay") for event in events)
    assert len(prepared) == len(set(prepared))
