from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amusd.errors import NotFiniteError
from amusd.models.language_model import argmax_rows

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("row", "column"),
    [
        ([1.0, 3.0, 3.0, 2.0], 1),
        ([2.0, 2.0, 2.0, 2.0], 0),
        ([-0.0, 0.0, -0.0, 0.0], 0),
        ([-INF, -INF, -7.0, -INF], 2),
    ],
)
def test_the_first_of_the_largest_is_chosen(row: list[float], column: int, dtype: torch.dtype) -> None:
    assert argmax_rows(torch.tensor([[9.0, 0.0, 0.0, 0.0], row], dtype=dtype)) == [0, column]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("row", "largest"),
    [
        ([-INF, -INF, -INF, -INF], "-inf"),
        ([0.0, INF, 5.0, INF], "inf"),
        ([INF, 1.0, NAN, NAN], "nan"),
        ([NAN, INF, NAN, 1.0], "nan"),
    ],
)
def test_a_largest_logit_that_is_no_finite_number_is_an_error(
    row: list[float], largest: str, dtype: torch.dtype
) -> None:
    with pytest.raises(NotFiniteError, match=f"the largest logit is {largest}$"):
        argmax_rows(torch.tensor([[9.0, 0.0, 0.0, 0.0], row], dtype=dtype))


@given(seed=st.integers(0, 2**31), rows=st.integers(0, 9), columns=st.integers(1, 200), dtype=st.sampled_from(DTYPES))
def test_random_logits_with_many_ties_are_judged_as_torch_does(
    seed: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (rows, columns), generator=generator).to(dtype)
    first_of_largest = (logits == logits.max(dim=-1, keepdim=True).values).int()
    assert argmax_rows(logits) == logits.argmax(dim=-1).tolist()
    assert argmax_rows(logits) == [row.index(1) for row in first_of_largest.tolist()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_whole_vocabulary_is_judged_as_torch_does(dtype: torch.dtype) -> None:
    logits = torch.randn((8, 49152), generator=torch.Generator().manual_seed(0)).to(dtype)
    columns = argmax_rows(logits)
    assert columns == logits.argmax(dim=-1).tolist()
    assert all(type(column) is int for column in columns)


def test_a_view_of_logits_is_read_as_what_it_shows() -> None:
    logits = torch.arange(24.0).view(4, 6)
    assert argmax_rows(logits[1:3, ::2]) == [2, 2]
    assert argmax_rows(logits.flip(0)[:, :3]) == [2, 2, 2, 2]
