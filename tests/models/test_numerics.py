from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amusd.errors import NotFiniteError
from amusd.models.numerics import Numerics
from amusd.models.passes import ModelOutput

widths = st.integers(1, 20)


def rules(fixed: bool | None = None) -> st.SearchStrategy[Numerics]:
    devices, either = st.sampled_from(["cpu", "cuda:0"]), st.booleans() if fixed is None else st.just(fixed)
    return st.builds(Numerics.for_device, devices, width=widths, fixed=either)


starts = st.integers(0, 5000)


@given(rule=rules(fixed=True), start=starts)
def test_a_fixed_block_is_never_empty_and_has_the_keys_of_each_of_its_rows_alone(rule: Numerics, start: int) -> None:
    rows = rule.max_rows(start)
    assert 1 <= rows <= rule.width
    alone = {rule.num_keys(position, 1) for position in range(start, start + rows)}
    assert alone == {rule.num_keys(start, rows)} or not rule.has_borders


@given(rule=rules(), start=starts, length=st.integers(1, 900))
def test_prompt_chunks_end_at_multiples_of_the_chunk_or_at_the_end(rule: Numerics, start: int, length: int) -> None:
    end = rule.prefill_end(start, start + length)
    assert start < end <= start + length
    assert end == start + length or end % rule.prefill_chunk == 0
    assert rule.num_keys(start, end - start) >= end


@given(rule=rules(), capacity=st.integers(1, 6000))
def test_padding_beyond_a_full_cache_fits_the_allocation(rule: Numerics, capacity: int) -> None:
    start = capacity - 1
    allocated = rule.allocation(capacity)
    assert start + rule.padded_rows(1) <= allocated
    assert rule.num_keys(start, rule.padded_rows(1)) <= allocated


@given(width=widths, start=starts)
def test_a_track_beside_a_row_ends_before_the_border_and_keeps_its_lane(width: int, start: int) -> None:
    rule = Numerics.for_device("cpu", width=width, fixed=True)
    last = start + rule.max_rows(start) - 1 + (rule.tracks_at(start) - 1) * rule.track_stride
    assert rule.num_keys(last, 1) == rule.num_keys(start, 1)
    assert rule.track_stride >= width
    assert rule.track_stride % 16 == 0


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_first_of_the_largest_is_chosen_and_must_be_a_finite_number(dtype: torch.dtype) -> None:
    for row, column in (([1.0, 3.0, 3.0, 2.0], 1), ([-0.0, 0.0, -0.0, 0.0], 0), ([-INF, -INF, -7.0, -INF], 2)):
        assert ModelOutput(torch.tensor([[9.0, 0.0, 0.0, 0.0], row], dtype=dtype)).choose() == [0, column]
    for row, largest in (([-INF] * 4, "-inf"), ([0.0, INF, 5.0, INF], "inf"), ([INF, 1.0, NAN, 1.0], "nan")):
        with pytest.raises(NotFiniteError, match=f"the largest logit is {largest}$"):
            ModelOutput(torch.tensor([[9.0, 0.0, 0.0, 0.0], row], dtype=dtype)).choose()
