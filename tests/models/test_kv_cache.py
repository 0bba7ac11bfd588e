from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from amusd.models.kv_cache import KVMemory, PreallocatedCache

HEADS, DIM, ALLOCATED = 3, 4, 24


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def new_cache(dtype: torch.dtype = torch.float32, capacity: int = 20) -> PreallocatedCache:
    return PreallocatedCache(KVMemory(ALLOCATED, dtype), capacity=capacity, allocated=ALLOCATED)


def begin(cache: PreallocatedCache, rows: int, slots: Tensor | None = None) -> None:
    cache.memory.slots_of_pass = cache.memory_slots(rows) if slots is None else slots


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
            begin(cache, rows, slots)
        for layer in range(2):
            ours = joint.memory.update_joint(states + layer, layer)
            theirs = separate.memory.update(*split(states + layer), layer)
            for mine, other in zip(ours, (part[0] for part in theirs), strict=True):
                assert mine.shape == (HEADS, ALLOCATED, DIM)
                assert mine.dtype is dtype
                assert torch.equal(mine, other)
        for cache in (joint, separate):
            cache.advance(rows)


@pytest.mark.parametrize("joint", [True, False])
def test_wiping_leaves_what_is_held_and_zeros_beyond(joint: bool) -> None:
    cache, states = new_cache(), key_values(9)
    begin(cache, 9)
    held = cache.memory.update_joint(states, 0) if joint else cache.memory.update(*split(states), 0)
    cache.advance(9)
    before = [part.clone() for part in held]
    cache.truncate(4)
    cache.wipe()
    for part, old in zip(held, before, strict=True):
        assert torch.equal(part[..., :4, :], old[..., :4, :])
        assert not part[..., 4:, :].any()


@pytest.mark.parametrize("kind", ["joint", "separate"])
@pytest.mark.parametrize("slots", [None, torch.tensor([3, 1])], ids=["in order", "slots"])
def test_rows_of_padding_are_not_written(kind: str, slots: Tensor | None) -> None:
    cache, states = new_cache(), key_values(8)
    begin(cache, 2, slots)
    keys, values = _write(cache, states, kind)
    written = torch.arange(2) if slots is None else slots
    for stored, given in zip((keys, values), split(states), strict=True):
        assert torch.equal(stored.reshape(HEADS, ALLOCATED, DIM)[:, written], given[0, :, :2])
        assert int(stored.count_nonzero()) == HEADS * 2 * DIM


def test_a_region_is_all_that_a_cache_writes_moves_and_wipes() -> None:
    memory = KVMemory(3 * ALLOCATED, torch.float32)
    caches = [PreallocatedCache(memory, capacity=20, allocated=ALLOCATED, number=number) for number in range(3)]
    for cache in caches:
        begin(cache, 20)
        memory.update_joint(key_values(20, seed=cache.number), 0)
        cache.advance(20)
    before = [part.clone() for part in memory.views(0)]
    cache = caches[1]
    cache.truncate(3)
    slots = [3, 4, 20]
    begin(cache, 3, cache.first + torch.tensor(slots))
    memory.update_joint(key_values(3, seed=9), 0)
    cache.path_slots = slots
    cache.keep([0, 2])
    cache.wipe()
    cache.truncate(0)
    for part, old in zip(memory.views(0), before, strict=True):
        for other in (slice(0, ALLOCATED), slice(2 * ALLOCATED, None)):
            assert torch.equal(part[:, other], old[:, other])
        assert torch.equal(part[:, ALLOCATED : ALLOCATED + 3], old[:, ALLOCATED : ALLOCATED + 3])
        assert not part[:, ALLOCATED + 5 : 2 * ALLOCATED].any()
    kept = split(key_values(3, seed=9)[[0, 2]])[0][0]
    assert torch.equal(memory.views(0)[0][:, ALLOCATED + 3 : ALLOCATED + 5], kept)


@pytest.mark.parametrize("kind", ["joint", "separate"])
def test_rows_that_are_kept_move_to_their_places(kind: str) -> None:
    cache, straight = new_cache(), new_cache()
    states = key_values(6)
    for each in (cache, straight):
        begin(each, 3)
        _write(each, key_values(3, seed=5), kind)
        each.advance(3)
    slots = [3, 4, 20, 5, 21, 22]
    begin(cache, 6, torch.tensor(slots))
    _write(cache, states, kind)
    cache.path_slots = slots
    cache.keep([0, 2, 4])
    assert cache.length == 6
    begin(straight, 3)
    _write(straight, states[[0, 2, 4]], kind)
    straight.advance(3)
    for each in (cache, straight):
        begin(each, 1)
    for moved, expected in zip(*(_write(each, key_values(1, seed=6), kind) for each in (cache, straight)), strict=True):
        assert torch.equal(moved[..., :7, :], expected[..., :7, :])
    with pytest.raises(ValueError, match="not one over paths"):
        cache.keep([0])


def _write(cache: PreallocatedCache, states: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return cache.memory.update_joint(states, 0) if kind == "joint" else cache.memory.update(*split(states), 0)
