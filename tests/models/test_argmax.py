from __future__ import annotations

import pytest
import torch

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
