"""The formulas against figures worked out elsewhere."""

from __future__ import annotations

import math

import pytest
from simulation.closed_forms import best_chain, best_synchronous, upper_bound, windowed

TABLE = [
    # a, c, synchronous (length), windowed, chain without restart loss, with a whole step lost (wait), bound
    (0.6, 5, 1.40, 2, 1.51, 1.57, 1.48, 0, 2.5),
    (0.8, 10, 2.47, 6, 2.64, 2.84, 2.69, 3, 5.0),
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
