"""What a device makes of a row of logits is enough to choose as the host does from the whole row."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from amusd.config import GREEDY, Distribution
from amusd.sampling.digest import Digest, Digests
from amusd.sampling.noise import Domain, codes_of, counters, gumbel, halves_of, key_of
from amusd.sampling.noisy_scores import device_counters, noisy_scores
from amusd.sampling.sampler import TargetSampler, TokenSampler

CPU = torch.device("cpu")


class SmallDigests(Digests):
    """So small that they often do not suffice."""

    @cached_property
    def few(self) -> Digest:
        return Digest(self._codes, CPU, num_best=2, num_likely=0, num_asked=4)

    @cached_property
    def many(self) -> Digest:
        return Digest(self._codes, CPU, num_best=3, num_likely=12, num_asked=4)


def random_logits(seed: int, rows: int, columns: int, kind: str) -> Tensor:
    """[rows, columns]; `kind`: how they are distributed."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((rows, columns))
    if kind == "heavy":  # a few likely ones and a long tail, as of text
        logits = rng.standard_normal((rows, columns)) * 1.5 + rng.exponential(2.5, (rows, columns))
    elif kind == "large":
        logits *= 1e4
    elif kind == "tied":
        logits = np.round(logits * 2)
    elif kind == "equal":
        logits[:] = 0.5
    elif kind == "barred":
        logits[:, 1:][:, rng.random(columns - 1) < 0.9] = -np.inf
    return torch.from_numpy(logits.astype(np.float32))


def with_keys(rows: int, columns: int) -> tuple[Tensor, Tensor, np.ndarray]:
    """Codes and keys as a device has them, and the counters that they stand for."""
    codes = codes_of(columns)
    keys = [key_of(5, row, Domain.MATCHING) for row in range(rows)]
    bits = np.array([halves_of(key) for key in keys], dtype=np.uint32).view(np.int32)
    exact = np.stack([counters(key, codes) for key in keys])
    return torch.from_numpy(codes.view(np.int32).copy()), torch.from_numpy(bits), exact


# The noise


def test_the_noise_of_a_device_is_that_of_the_host() -> None:
    codes, keys, exact = with_keys(8, 5000)
    assert np.array_equal(device_counters(codes, keys).numpy().view(np.uint32), exact)
    logits, scale = torch.randn((8, 5000)), torch.linspace(0, 2, 8)
    scores = noisy_scores(logits, codes, keys, scale)
    np.testing.assert_allclose(
        scores.numpy(), logits.numpy() + scale.numpy()[:, None] * gumbel(exact), rtol=2e-6, atol=4e-6
    )
    assert torch.equal(scores[0], logits[0]), "greedy: no noise at all"


IN_THE_INTERPRETER = """
import numpy as np, torch
from amusd.sampling.noisy_scores import compose_noisy_scores
from amusd.sampling.noisy_scores_triton import launch_noisy_scores
from tests.sampling.test_digest import with_keys
codes, keys, _ = with_keys(3, 2500)
logits, scale = torch.randn((3, 2500)) * 4, torch.tensor([0.0, 0.7, 1.0])
for dtype in (torch.float32, torch.bfloat16):
    found = launch_noisy_scores(logits.to(dtype), codes, keys, scale)
    expected = compose_noisy_scores(logits.to(dtype), codes, keys, scale)
    assert torch.equal(found[0], expected[0])
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=2e-6, atol=4e-6)
"""


def test_the_kernel_computes_the_same_in_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", IN_THE_INTERPRETER]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# The choice

filters = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.sampled_from([1, 2, 5, 11, 12, 13, 40, 2000]),
        "top_p": st.sampled_from([1e-9, 0.3, 0.5, 0.75, 0.9, 0.95, 0.999]),
        "min_p": st.sampled_from([0.001, 0.05, 0.5, 1.0]),
        "repetition_penalty": st.sampled_from([0.7, 1.2, 5.0]),
        "presence_penalty": st.sampled_from([-1.5, 0.4, 8.0]),
        "frequency_penalty": st.sampled_from([-1.0, 0.3, 2.0]),
        "logit_bias": st.lists(
            st.tuples(st.integers(0, 50), st.sampled_from([-100.0, -1.0, 0.5, 30.0])), max_size=6
        ).map(tuple),
    },
)
kinds = st.sampled_from(["normal", "heavy", "large", "tied", "equal", "barred"])


@pytest.mark.parametrize("make_digests", [Digests, SmallDigests])
@settings(max_examples=80)
@given(
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0]),
    parameters=filters,
    kind=kinds,
    columns=st.sampled_from([1, 2, 5, 40, 1500]),
    seed=st.integers(0, 2**32 - 1),
    is_coarse=st.booleans(),
    is_reduced=st.booleans(),
)
def test_a_digest_decides_as_whole_rows_do(
    make_digests: type[Digests],
    temperature: float,
    parameters: dict[str, Any],
    kind: str,
    columns: int,
    seed: int,
    is_coarse: bool,
    is_reduced: bool,
) -> None:
    logits = random_logits(seed, 4, columns, kind)
    logits = logits.bfloat16() if is_coarse else logits  # of which many are equal
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(np.sort(rng.permutation(2 * columns)[:columns])) if is_reduced else None
    prompt = rng.integers(0, 2 * columns, 12).tolist()
    distribution = Distribution(temperature=temperature, seed=seed, **parameters)
    digests = make_digests(columns, ids, CPU)
    near = TokenSampler(distribution, columns, ids, prompt=prompt)
    away = TokenSampler(distribution, columns, ids, prompt=prompt, digests=digests)
    for start in (12, 14, 13):  # the last one after a rollback
        token_ids = rng.integers(0, columns, 4).tolist()
        assert away.choose(logits, start, token_ids) == near.choose(logits, start, token_ids)
    assert away.num_rows == 12
    if distribution.is_argmax or columns <= 5 <= (away.digest.num_likely if away.digest else 0):
        assert away.num_whole_rows == 0


def texts(rows: int, columns: int = 30_000) -> Tensor:
    """Logits whose likely columns are few, as of text."""
    return random_logits(3, rows, columns, "heavy") * 1.4


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"top_k": 40},
        {"top_p": 0.9, "presence_penalty": 1.0},
        {"min_p": 0.05, "logit_bias": ((3, 9.0),)},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_digest_of_real_size_settles_likely_choices(temperature: float, parameters: dict[str, Any]) -> None:
    logits = texts(32)
    distribution = Distribution(temperature=temperature, **parameters)
    sampler = TokenSampler(distribution, 30_000, digests=Digests(30_000, None, CPU))
    chosen = sampler.choose(logits, 0, [7] * 32)
    assert chosen == TokenSampler(distribution, 30_000).choose(logits, 0, [7] * 32)
    assert (sampler.num_rows, sampler.num_whole_rows) == (32, 0)


@pytest.mark.parametrize(
    "distribution", [GREEDY, Distribution(temperature=0.7), Distribution(temperature=1, top_p=0.9)]
)
def test_the_most_likely_columns_come_with_the_digest(distribution: Distribution) -> None:
    logits = texts(4)
    logits[:, 7] = logits[:, 9]  # equal ones stand in their order
    logits[2, 100:] = -torch.inf
    logits[3, 3:] = -torch.inf  # barred: not reported
    near, away = (
        TargetSampler(distribution, 30_000, logprobs=True, top_logprobs=20, digests=digests)
        for digests in (None, Digests(30_000, None, CPU))
    )
    candidates = TokenSampler(distribution, 30_000).choose(logits, 0, [0] * 4)[:3]
    for sampler in (near, away):
        sampler.accept(logits, 0, [0, *candidates], candidates)
    assert away.num_whole_rows <= 1  # the last one: of three columns
    assert away.logprobs == pytest.approx(near.logprobs, abs=1e-5)
    assert [len(top) for top in away.top_logprobs] == [20, 20, 20, 3]
    for ours, theirs in zip(away.top_logprobs, near.top_logprobs, strict=True):
        assert [column for column, _ in ours] == [column for column, _ in theirs]
        assert [logprob for _, logprob in ours] == pytest.approx([logprob for _, logprob in theirs], abs=1e-5)


# What is done on the device


class Recorder(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


VIEWS = ("view", "slice", "select", "unsqueeze", "squeeze", "split", "unbind", "alias", "detach", "expand")


@pytest.mark.parametrize(("size", "most"), [("few", 19), ("many", 31)])
def test_a_device_is_asked_for_nothing(size: str, most: int) -> None:
    """Tensors on `meta` have no values: whatever would read one, or has a shape that depends on one, raises."""
    device = torch.device("meta")
    digest = getattr(Digests(128_256, None, device), size)
    logits = torch.empty((8, 128_256), dtype=torch.bfloat16, device=device)
    inputs = torch.empty((8, digest.num_inputs), dtype=torch.int64, device=device)
    with Recorder() as recorder:
        winners, outputs = digest.compute(logits, inputs)
        kernels = sum(count for name, count in recorder.names.items() if not name.split(".")[1].startswith(VIEWS))
    assert (winners.shape, winners.dtype, winners.device) == ((8,), torch.int64, device)
    assert (outputs.shape, outputs.dtype) == ((8, digest.num_outputs), torch.int32)
    assert recorder.names["amusd.noisy_scores.default"] == 1
    assert kernels <= most, recorder.names


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_column_that_was_written_often_enough_wins_from_outside_the_digest(temperature: float) -> None:
    logits = torch.arange(9000.0, 0.0, -1.0).unsqueeze(0) / 100  # column 5000 is unlikely: 50 below the best
    distribution, context = Distribution(temperature=temperature, frequency_penalty=-20.0, seed=2), [5000] * 8
    chosen = [
        TokenSampler(distribution, 9000, prompt=[1], digests=digests) for digests in (Digests(9000, None, CPU), None)
    ]
    for sampler in chosen:
        sampler.see([1, *context])
        assert sampler.choose(logits, 8, [5000]) == [5000]
