"""Ranks that meet, compute together, and lose each other. Followers are threads here; processes are in tests/launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models.blocks import random_ids
from models.linked_ranks import DEADLINE_SECONDS, come, lead
from models.paths import decoded_both_ways, tree_rows
from models.test_decoder import Case, lean_model, stock_model

from amusd.errors import ConfigError, PeerFailedError, RankLostError
from amusd.models.cached_model import CachedModel
from amusd.models.numerics import Numerics
from amusd.models.passes import PathRows
from amusd.models.process_group import ProcessGroup, backend_for
from amusd.models.rank_commands import PartCommand, PathsCommand, RankCommand, follow
from amusd.runtime.ranks import Leader

STOCK = stock_model(Case("Qwen3Config", {"num_attention_heads": 8, "num_key_value_heads": 4}))


def follow_at(folder: Path, rank: int, size: int, rule: Numerics | None = None) -> list[int]:
    """A follower's life; returns the cache lengths that its passes started from."""
    follower = come(folder, rank, size)
    starts: list[int] = []

    def commands() -> Iterator[RankCommand]:
        for command in follower.commands():
            starts.append(command.parts[0].start)
            yield command

    try:
        model = lean_model(STOCK, *([] if rule is None else [rule]), ranks=follower)
        follower.ready("cpu", DEADLINE_SECONDS)
        follow(model, commands())
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
    expected = alone.extend(token_ids[-1:], cache, 20)
    with meeting(tmp_path, 2) as (leader, followers):
        model = lean_model(STOCK, ranks=leader)
        leader.await_followers("cpu", DEADLINE_SECONDS)
        cache = model.new_cache(100)
        model.prefill(token_ids[:-1], cache)
        assert model.extend(token_ids[-1:], cache, 20) == expected
        other = model.new_cache(50)  # a second sequence, and then a rollback of the first
        model.prefill(random_ids(30, seed=3), other)
        cache.truncate(39)
        assert model.extend(token_ids[-1:], cache, 20) == expected
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
            model.forward([1, 2], model.new_cache(8))
        assert isinstance(followers[0].exception(DEADLINE_SECONDS), RankLostError)


class FailingExchanges:
    """A process group that fails at one of its exchanges, counted from 0, and is gone then as with its process."""

    def __init__(self, group: ProcessGroup, number: int) -> None:
        self._group: ProcessGroup | None = group
        self.num_left = number

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return self._live().sum(part)

    def join(self, part: torch.Tensor) -> torch.Tensor:
        return self._live().join(part)

    def _live(self) -> ProcessGroup:
        if self.num_left == 0:
            self._group = None
            raise ValueError("out of paper")
        assert self._group is not None
        self.num_left -= 1
        return self._group


NUM_EXCHANGES = 3 * (2 * STOCK.config.num_hidden_layers + 1) - 1
"""Of a chunk of a prompt, whose logits nobody needs, a pass and a pass over a tree."""


def _three_passes(model: CachedModel) -> None:
    cache = model.new_cache(20, spare=8)
    model.prefill(random_ids(5), cache)
    model.forward([1, 2], cache)
    model.forward_trees([tree_rows([3, 4], np.arange(5), [[12], [12, 14]], cache)])


@pytest.mark.parametrize(
    ("fails", "number"), [("leader", 0), ("follower", NUM_EXCHANGES // 2), ("leader", NUM_EXCHANGES)]
)
def test_a_rank_that_fails_at_any_exchange_ends_all_with_its_reason(tmp_path: Path, fails: str, number: int) -> None:
    """Nobody waits for it, and nobody goes on; behind the last exchange nothing fails."""

    def life(folder: Path, rank: int, size: int) -> None:
        follower = come(folder, rank, size)
        try:
            model = lean_model(STOCK, ranks=follower)
            follower.ready("cpu", DEADLINE_SECONDS)
            if fails == "follower" and rank == 2:
                follower._group = FailingExchanges(follower._met, number)  # type: ignore[assignment]  # a double
            follow(model, follower.commands())
        except BaseException as error:
            follower.close(error)
            raise
        follower.close()

    with meeting(tmp_path, 3, life) as (leader, followers):
        model = lean_model(STOCK, ranks=leader)
        leader.await_followers("cpu", DEADLINE_SECONDS)
        exchanges = FailingExchanges(leader._met, number if fails == "leader" else NUM_EXCHANGES)
        leader._group = exchanges  # type: ignore[assignment]  # a double
        if number == NUM_EXCHANGES:
            _three_passes(model)
            assert exchanges.num_left == 0
        elif fails == "leader":
            with pytest.raises(ValueError, match="out of paper"):
                _three_passes(model)
        else:
            with pytest.raises(PeerFailedError, match=r"^rank 2 of the target failed: out of paper$"):
                _three_passes(model)
        exchanges._group = None  # the group ends with its last owner
        leader.close()
        errors = [follower.exception(DEADLINE_SECONDS) for follower in followers]
    if number == NUM_EXCHANGES:
        assert errors == [None, None]
    elif fails == "leader":
        assert {type(error) for error in errors} == {RankLostError}
    else:
        assert [type(error) for error in errors] == [RankLostError, ValueError]


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


@given(
    command=st.builds(
        RankCommand,
        memory=st.integers(1, 9),
        num_caches=st.integers(1, 9),
        capacity=st.integers(1, 9999),
        spare=st.integers(0, 99),
        parts=st.lists(
            st.builds(
                PartCommand,
                cache=st.integers(0, 8),
                start=st.integers(0, 9999),
                token_ids=st.lists(st.integers(0, 200_000), max_size=40),
                paths=st.none()
                | st.builds(
                    PathRows,
                    st.lists(st.integers(0, 99), max_size=9).map(np.array),
                    st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3), max_size=3),
                ).map(PathsCommand.of),
            ),
            max_size=4,
        ),
        with_logits=st.booleans(),
        steps=st.integers(1, 8),
        sampler=st.integers(0, 4),
        kept=st.none() | st.lists(st.integers(0, 30), max_size=8),
        dropped=st.lists(st.integers(1, 9), max_size=3),
    )
)
def test_a_command_arrives_as_it_was_given(command: RankCommand) -> None:
    assert RankCommand.from_bytes(command.to_bytes()) == command


def test_the_rows_of_a_pass_arrive_as_they_were() -> None:
    rows = PathRows(np.array([4, 5, 6, 1, 2, 9]), [[3], [3, 7]])
    command = PathsCommand.of(rows)
    assert command is not None
    assert command.rows().prefix.tolist() == rows.prefix.tolist()
    assert command.rows().paths == rows.paths


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
