from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from amusd.models.kv_cache import PreallocatedCache

HEADS, DIM, ALLOCATED = 3, 4, 24


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def new_cache(dtype: torch.dtype = torch.float32, capacity: int = 20) -> PreallocatedCache:
    return PreallocatedCache(capacity=capacity, allocated=ALLOCATED, dtype=dtype)


def key_values(rows: int, seed: int = 0) -> Tensor:
    """[rows, 2 * heads, dim], the keys' heads first."""
    return torch.randn((rows, 2 * HEADS, DIM), generator=torch.Generator().manual_seed(seed))


def split(joint: Tensor) -> tuple[Tensor, Tensor]:
    """The same keys and values as `update` takes them: [1, heads, rows, dim] each."""
    keys, values = joint.transpose(0, 1).unsqueeze(0).chunk(2, dim=1)
    return keys, values


@pytest.mark.parametrize("with_slots", [False, True], ids=["in order", "slots"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_joint_keys_and_values_are_kept_as_separate_ones_are(dtype: torch.dtype, with_slots: bool) -> None:
    joint, separate = new_cache(dtype), new_cache(dtype)
    for seed, rows in enumerate((5, 1, 8)):
        states = key_values(rows, seed)
        slots = torch.arange(joint.length, joint.length + rows) if with_slots else None
        for cache in (joint, separate):
            cache.begin(rows, cache.length + rows, slots)
        for layer in range(2):
            ours = joint.update_joint(states + layer, layer)
            theirs = separate.update(*split(states + layer), layer)
            for mine, other in zip(ours, (part[0] for part in theirs), strict=True):
                assert mine.shape == (HEADS, joint.length + rows, DIM)
                assert mine.dtype is dtype
                assert torch.equal(mine, other)
        for cache in (joint, separate):
            cache.advance(rows)


@pytest.mark.parametrize("joint", [True, False])
def test_wiping_leaves_what_is_held_and_zeros_beyond(joint: bool) -> None:
    cache, states = new_cache(), key_values(9)
    cache.begin(9, ALLOCATED)
    held = cache.update_joint(states, 0) if joint else cache.update(*split(states), 0)
    cache.advance(9)
    before = [part.clone() for part in held]
    cache.truncate(4)
    cache.wipe()
    for part, old in zip(held, before, strict=True):
        assert torch.equal(part[..., :4, :], old[..., :4, :])
        assert not part[..., 4:, :].any()


def test_slots_are_where_rows_go_and_nothing_else_changes() -> None:
    cache = new_cache()
    cache.begin(20, ALLOCATED)
    cache.update_joint(key_values(20), 0)
    cache.advance(20)
    cache.truncate(7)
    keys, values = (view.clone() for view in cache.update_joint(key_values(0), 0))
    states, slots = key_values(3, seed=1), torch.tensor([2, 19, 11])
    cache.begin(3, ALLOCATED, slots)
    new_keys, new_values = cache.update_joint(states, 0)
    keys[:, slots], values[:, slots] = (part[0] for part in split(states))
    assert torch.equal(new_keys, keys)
    assert torch.equal(new_values, values)
    assert cache.length == 7


def test_after_a_pass_with_slots_rows_go_to_the_end_again() -> None:
    cache = new_cache()
    cache.begin(2, 8, torch.tensor([5, 6]))
    cache.update_joint(key_values(2), 0)
    cache.begin(2, 8)
    states = key_values(2, seed=1)
    keys, _ = cache.update_joint(states, 0)
    assert torch.equal(keys[:, :2], split(states)[0][0])


def test_views_follow_the_number_of_keys_and_stay_while_it_does() -> None:
    cache = new_cache()
    cache.begin(4, 8)
    first, _ = cache.update_joint(key_values(4), 0)  # [heads, keys, dim]
    cache.advance(4)
    cache.begin(4, 8)
    again, _ = cache.update_joint(key_values(4, seed=1), 0)
    assert again is first  # a captured pass reads from the same address
    cache.advance(4)
    cache.begin(4, 16)
    keys, values = cache.update_joint(key_values(4, seed=2), 0)
    assert keys.shape == values.shape == (HEADS, 16, DIM)
    assert torch.equal(keys[:, :8], first)
    cache.begin(4, 8)
    assert cache.update_joint(key_values(4), 0)[0].shape[1] == 8


def test_what_attention_is_given_ends_at_the_number_of_keys() -> None:
    cache = new_cache()
    cache.begin(20, ALLOCATED)
    cache.update_joint(torch.full((20, 2 * HEADS, DIM), torch.nan), 0)
    cache.begin(8, 8)
    for view in cache.update_joint(key_values(8), 0):
        assert view.shape == (HEADS, 8, DIM)
        assert torch.isfinite(view).all()


def test_memory_that_was_never_written_is_finite() -> None:
    cache = new_cache()
    cache.begin(1, ALLOCATED)
    for view in cache.update_joint(key_values(1), 0):
        assert torch.equal(view[:, 1:], torch.zeros((HEADS, ALLOCATED - 1, DIM)))


def test_rows_of_padding_may_stand_beyond_the_capacity_but_not_beyond_memory() -> None:
    cache = new_cache(capacity=20)
    cache.begin(18, 18)
    cache.update_joint(key_values(18), 0)
    cache.advance(18)
    cache.begin(6, ALLOCATED)
    cache.update_joint(key_values(6), 0)
    cache.advance(2)
    assert cache.length == cache.capacity == 20
    with pytest.raises(ValueError, match="exceed 24 positions"):
        cache.begin(5, 24)
    with pytest.raises(ValueError, match="exceed 24 positions"):
        cache.begin(1, 25)
    with pytest.raises(ValueError, match="exceed the capacity of 20"):
        cache.advance(1)
    assert cache.length == 20


@pytest.mark.parametrize(("capacity", "allocated"), [(0, 8), (9, 8)])
def test_an_impossible_size_is_refused(capacity: int, allocated: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        PreallocatedCache(capacity=capacity, allocated=allocated, dtype=torch.float32)


@pytest.mark.parametrize("kind", ["joint", "separate"])
def test_rows_that_are_kept_move_to_their_places(kind: str) -> None:
    cache, straight = new_cache(), new_cache()
    states = key_values(6)
    for each in (cache, straight):
        each.begin(3, 3)
        _write(each, key_values(3, seed=5), kind)
        each.advance(3)
    slots = [3, 4, 20, 5, 21, 22]
    cache.begin(6, ALLOCATED, slots=torch.tensor(slots))
    _write(cache, states, kind)
    cache.path_slots = slots
    cache.keep([0, 2, 4])
    assert cache.length == 6
    straight.begin(3, 6)
    _write(straight, states[[0, 2, 4]], kind)
    straight.advance(3)
    for each in (cache, straight):
        each.begin(1, 7)
    for moved, expected in zip(*(_write(each, key_values(1, seed=6), kind) for each in (cache, straight)), strict=True):
        assert torch.equal(moved, expected)
    with pytest.raises(ValueError, match="not one over paths"):
        cache.keep([0])


def _advance(cache: PreallocatedCache) -> None:
    cache.begin(1, 9)
    _write(cache, key_values(1), "joint")
    cache.advance(1)


@pytest.mark.parametrize("forget", [_advance, lambda cache: cache.truncate(3)], ids=["another pass", "a rollback"])
def test_the_rows_of_a_pass_over_paths_cannot_be_kept_later(forget: Callable[[PreallocatedCache], None]) -> None:
    cache = new_cache()
    cache.begin(4, 4)
    _write(cache, key_values(4), "joint")
    cache.advance(4)
    slots = [4, 5, 20]
    cache.begin(3, ALLOCATED, slots=torch.tensor(slots))
    _write(cache, key_values(3), "joint")
    cache.path_slots = slots
    forget(cache)
    length = cache.length
    with pytest.raises(ValueError, match="not one over paths"):
        cache.keep([0, 2])
    assert cache.length == length


def _write(cache: PreallocatedCache, states: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return cache.update_joint(states, 0) if kind == "joint" else cache.update(*split(states), 0)
