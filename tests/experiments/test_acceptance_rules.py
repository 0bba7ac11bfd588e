"""The formulas of `experiments/acceptance_rules`, against their definitions."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def run() -> ModuleType:
    path = Path(__file__).parents[2] / "experiments" / "acceptance_rules" / "run.py"
    spec = importlib.util.spec_from_file_location("acceptance_rules_run", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


WEIGHTS = st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1) | st.just(0.0)), min_size=2, max_size=7).filter(
    lambda pairs: any(q for _, q in pairs)
)


@given(pairs=WEIGHTS)
def test_the_formulas_are_their_definitions(run: ModuleType, pairs: list[tuple[float, float]]) -> None:
    p, q = (np.array(values) / sum(values) for values in zip(*pairs, strict=True))
    found = run.formulas_of(p, q)
    matching = 0.0
    for i in range(len(p)):
        if q[i] > 0:
            matching += 1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(len(p)))
    assert found.matching == pytest.approx(matching, rel=1e-9)
    assert found.ratio == pytest.approx(np.minimum(p, q).sum(), rel=1e-9)
    assert found.unshared == pytest.approx((p * q).sum(), rel=1e-9)
    assert found.matching_bound - 1e-9 <= found.matching <= found.ratio + 1e-9


def test_equal_distributions_always_agree(run: ModuleType) -> None:
    p = np.array([0.2, 0.5, 0.3])
    found = run.formulas_of(p, p)
    assert (found.ratio, found.matching, found.matching_bound) == pytest.approx((1.0, 1.0, 1.0))
