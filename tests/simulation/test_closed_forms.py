"""The formulas against figures worked out elsewhere, and against each other."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.closed_forms import (
    best_chain,
    best_synchronous,
    chain,
    synchronous,
    upper_bound,
    windowed,
)

rates = st.floats(0.05, 0.99)
speeds = st.integers(2, 20)

TABLE = [
    # a, c, synchronous (length), windowed, chain without restart loss, with a whole step lost (wait), bound
    (0.6, 5, 1.40, 2, 1.51, 1.57, 1.48, 0, 2.5),
    (0.6, 10, 1.67, 3, 1.56, 1.76, 1.65, 2, 2.5),
    (0.8, 2.2, 1.28, 2, 1.55, 1.55, 1.40, 0, 2.75),
    (0.8, 10, 2.47, 6, 2.64, 2.84, 2.69, 3, 5.0),
    (0.9, 16, 4.26, 12, 4.75, 5.10, 4.94, 6, 10.0),
    (0.95, 10, 4.48, 15, 5.94, 6.01, 5.83, 4, 10.5),
]


@pytest.mark.parametrize(("a", "c", "sync", "length", "window", "ideal", "lossy", "wait", "bound"), TABLE)
def test_known_figures(
    a: float, c: float, sync: float, length: int, window: float, ideal: float, lossy: float, wait: int, bound: float
) -> None:
    assert best_synchronous(a, c, range(1, 25)) == (pytest.approx(sync, abs=0.006), length)
    assert windowed(a, c, math.floor(c)) == pytest.approx(window, abs=0.006)
    assert best_chain(a, c, range(9))[0] == pytest.approx(ideal, abs=0.006)
    assert best_chain(a, c, range(9), restart_loss=1) == (pytest.approx(lossy, abs=0.006), wait)
    assert upper_bound(a, c) == pytest.approx(bound, abs=0.05)


@given(rates, speeds, st.integers(0, 19), st.floats(0, 0.4), st.floats(0, 1))
def test_nothing_exceeds_the_bound(a: float, c: int, number: int, delay: float, loss: float) -> None:
    for value in (
        chain(a, c, number, delay=delay, restart_loss=loss),
        windowed(a, c, number + 1),
        synchronous(a, c, number + 1, overhead=2 * delay),
    ):
        assert 0 < value <= upper_bound(a, c) * (1 + 1e-9)
