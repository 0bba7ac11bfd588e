"""The choice from logits: as defined, whatever else is in the pass, and with a GPU's operators."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda.device import fake_cuda
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling.reference import noise, processed
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from amusd.config import Distribution
from amusd.sampling.noise import choose
from amusd.sampling.processors import kept_columns
from amusd.sampling.ranking import RowRanker
from amusd.sampling.sampler import Level, RowSampler, SamplingState, SequenceSampler, scores_of
from amusd.sampling.sampler_inputs import SamplerInputs

LOGITS = [2.0, -1.0, 0.5, 1.0, -3.0, 0.5]
ROUNDING = 1e-4

biases = st.tuples(st.integers(0, 50), st.sampled_from([-100.0, -1.0, 0.5, 30.0]))
parameters = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.sampled_from([1, 2, 5, 13, 40, 2000]),
        "top_p": st.sampled_from([1e-9, 0.3, 0.75, 0.95, 0.999]),
        "min_p": st.sampled_from([0.001, 0.05, 0.5, 1.0]),
        "repetition_penalty": st.sampled_from([0.7, 1.2, 5.0]),
        "presence_penalty": st.sampled_from([-1.5, 0.4, 8.0]),
        "frequency_penalty": st.sampled_from([-1.0, 0.3, 2.0]),
        "logit_bias": st.lists(biases, max_size=6).map(tuple),
    },
)


def columns_of(sampler: SequenceSampler, logits: Tensor, start: int, token_ids: list[int], **kwargs: Any) -> list[int]:
    device, packed = sampler.state.device, torch.from_numpy(sampler.inputs(start, token_ids, **kwargs))
    chosen: list[int] = sampler.sampler.compute(logits.to(device), packed.to(device))[0].tolist()
    return chosen


def using(device: str) -> AbstractContextManager[object]:
    """Inside, a state may be on `device`; on a GPU whole rows are sorted and scored, in operators of fixed shape."""
    return nullcontext() if device == "cpu" else fake_cuda(values=True)


on_both = pytest.mark.parametrize("device", ["cpu", "cuda:0"])


def random_logits(seed: int, rows: int, columns: int, scale: float = 3.0) -> Tensor:
    return torch.from_numpy((np.random.default_rng(seed).standard_normal((rows, columns)) * scale).astype(np.float32))


# What is chosen


@on_both
@settings(max_examples=80)
@given(
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 3.0]),
    changes=parameters,
    columns=st.sampled_from([1, 2, 5, 40, 3000]),
    scale=st.sampled_from([0.01, 3.0, 3.0, 100.0]),
    seed=st.integers(0, 2**32 - 1),
    is_reduced=st.booleans(),
)
def test_a_choice_is_the_noisy_argmax_of_the_definition(
    device: str, temperature: float, changes: dict[str, Any], columns: int, scale: float, seed: int, is_reduced: bool
) -> None:
    rng = np.random.default_rng(seed)
    logits = random_logits(seed, 3, columns, scale)
    logits[1] = logits[1].round()  # with ties
    logits[2] -= logits[2].max() + 1  # none above 0
    ids = np.sort(rng.permutation(2 * columns)[:columns]) if is_reduced else np.arange(columns)
    prompt, answer, block = (rng.integers(0, 2 * columns, number).tolist() for number in (6, 5, 3))
    distribution = Distribution(temperature=temperature, seed=seed, **changes)
    start = len(prompt) + len(answer)
    with using(device):
        state = SamplingState(columns, torch.from_numpy(ids) if is_reduced else None, device)
        sampler = SequenceSampler(distribution, state, prompt)
        sampler.see([*prompt, *answer])
        chosen = columns_of(sampler, logits, start, block)
    for row, column in enumerate(chosen):
        written = [*answer, *block[: row + 1]]
        scores = processed(distribution, logits[row].tolist(), prompt, written, ids.tolist())
        if temperature:
            scores = scores + noise(seed, start + row + 1, ids.tolist())
        assert scores[column] >= scores.max() - ROUNDING * max(1, abs(scores.max()))


@on_both
def test_a_token_of_the_prompt_is_penalized(device: str) -> None:
    with using(device):
        sampler = SequenceSampler(Distribution(repetition_penalty=5.0), SamplingState(3, device=device), [1])
        assert columns_of(sampler, torch.tensor([[1.0, 2.0, 0.0]]), 1, [2]) == [0]


@on_both
@pytest.mark.parametrize(
    ("changes", "number"), [({"top_p": 0.81}, 3), ({"top_p": 0.79}, 2), ({"top_k": 3}, 3), ({"min_p": 0.29}, 3)]
)
def test_a_filter_keeps_the_likeliest_up_to_its_border(device: str, changes: dict[str, Any], number: int) -> None:
    with using(device):
        sampler = SequenceSampler(Distribution(temperature=1.0, **changes), SamplingState(4, device=device))
        logits, packed = torch.tensor([[0.05, 0.5, 0.3, 0.15]]).log(), torch.from_numpy(sampler.inputs(0, [0]))
        left = sampler.sampler.shaped(logits.to(device), packed.to(device)).isfinite()
        assert left[0].tolist() == [False, True, True, number > 2]


@pytest.mark.parametrize("changes", [{"top_p": 0.9999}, {"top_k": 921}])
def test_a_cpu_looks_as_far_as_filters_reach(changes: dict[str, Any]) -> None:
    """Further than it looks first: each column is less likely by 1 % than the one before."""
    logits = np.arange(3000, dtype=np.float32) * np.float32(-0.01)
    packed = SamplingState(3000).packed_inputs(Distribution(temperature=1.0, **changes))
    left = kept_columns(logits, SamplerInputs.of(packed))
    assert left.tolist() == [*range(len(left))]
    assert len(left) == pytest.approx(100 * np.log(1 / 0.0001), abs=1)


@pytest.mark.parametrize(("first", "chosen"), [(0.0, 700), (25.9, 700), (26.1, 0)])
def test_the_most_extreme_noise_is_no_exception(first: float, chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """-3.13 against 22.87, the ends of its range, of an unlikely column that is looked at last."""
    smallest = np.where(np.arange(5000) == 700, 0, 2**32 - 1).astype(np.uint32)
    monkeypatch.setattr("amusd.sampling.noise.counters", lambda codes, _key: smallest[codes])
    logits = np.zeros(5000, np.float32) - np.linspace(0, 0.001, 5000, dtype=np.float32)
    logits[[0, 700]] = first, -0.01
    assert choose(logits, np.arange(5000, dtype=np.uint32), 0, 1.0) == chosen


# A choice does not depend on the rest of its pass


@pytest.mark.parametrize(
    "changes",
    [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"presence_penalty": 1.0, "logit_bias": ((3, 9.0),)}],
    ids=str,
)
@on_both
def test_a_choice_depends_on_seed_and_position_and_not_on_its_pass(device: str, changes: dict[str, Any]) -> None:
    """In passes of 1 to 24 rows, beside rows of other requests, and again, as after a rollback."""
    logits = random_logits(0, 24, 700, 1.0)
    tokens = [number * 29 % 700 for number in range(24)]

    def chosen(seed: int, start: int, parts: Sequence[int]) -> list[int]:
        distribution = Distribution(temperature=1.0, seed=seed, **changes)
        sampler = SequenceSampler(distribution, SamplingState(700, device=device), [1] * start)
        found: list[int] = []
        for number in parts:
            first = len(found)
            block = tokens[first : first + number]
            sampler.see([*[1] * start, *tokens[:first]])
            found += columns_of(sampler, logits[first : first + number], start + first, block)
        return found

    with using(device):
        whole = chosen(3, 10, [24])
        assert chosen(3, 10, [1] * 24) == chosen(3, 10, [7, 1, 8, 8]) == whole
        assert chosen(3, 11, [24]) != whole
        assert chosen(4, 10, [24]) != whole


def test_rows_of_several_requests_share_a_pass() -> None:
    logits, state = random_logits(2, 3, 60), SamplingState(60, num_sequences=2)
    shaped = SequenceSampler(Distribution(logit_bias=((7, 90.0),), presence_penalty=9.0), state, [5], sequence=0)
    warm = SequenceSampler(Distribution(temperature=0.8, seed=4), state, sequence=0)
    sampler, packed = shaped.sampler, np.tile(shaped.sampler.neutral, (3, 1))
    packed[0], packed[1] = shaped.inputs(0, [5])[0], warm.inputs(6, [5])[0]
    together = sampler.compute(logits, torch.from_numpy(packed))[0].tolist()
    assert together == [7, columns_of(warm, logits[1:2], 6, [5])[0], int(logits[2].argmax())]


def test_penalties_see_the_tokens_before_each_row_and_forget_those_cut_off() -> None:
    sampler = SequenceSampler(Distribution(presence_penalty=100.0), SamplingState(4), [0])
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).expand(3, -1)
    assert columns_of(sampler, logits, 0, [0, 0, 1]) == [0, 1, 2], "the prompt's last token is none of the answer's"
    assert columns_of(sampler, logits[:2], 1, [2, 0]) == [0, 1]  # the first block was rejected
    sampler.see([0, 1, 0, 2])
    assert columns_of(sampler, logits[:1], 3, [2]) == [3]
    sampler.see([0])
    assert columns_of(sampler, logits, 0, [0, 0, 2], parents=[0, 0]) == [0, 1, 0], "each path has its own"


def test_a_row_that_is_no_number_still_gives_a_column_on_a_gpu() -> None:
    with using("cuda:0"):
        for row in ([0.0, np.nan, 1.0], [np.nan] * 3, [-np.inf] * 3):
            for changes in ({}, {"top_p": 0.5}):
                sampler = SequenceSampler(Distribution(temperature=1.0, **changes), SamplingState(3, device="cuda:0"))
                assert columns_of(sampler, torch.tensor([row]), 0, [0])[0] in range(3)


# Log-probabilities


def test_log_probabilities_are_the_models_own_and_the_most_likely_come_first() -> None:
    distribution = Distribution(temperature=0.3, top_k=1, logit_bias=((1, 50.0),))
    sampler = SequenceSampler(distribution, SamplingState(len(LOGITS)), is_scored=True)
    columns, outputs = sampler.sampler.compute(torch.tensor([LOGITS]), torch.from_numpy(sampler.inputs(0, [0])))
    assert columns.tolist() == [1]
    expected = torch.tensor(LOGITS).double().log_softmax(0).tolist()
    chosen, top = scores_of(outputs[0].numpy(), 4)
    assert chosen == pytest.approx(expected[1], abs=1e-6)
    assert [column for column, _ in top] == [0, 3, 2, 5]
    assert [value for _, value in top] == pytest.approx([expected[column] for column in (0, 3, 2, 5)], abs=1e-6)
    barred = torch.tensor([[0.0, -torch.inf, -torch.inf, 1.0, -torch.inf, -torch.inf]])
    _, outputs = sampler.sampler.compute(barred, torch.from_numpy(sampler.inputs(0, [0])))
    assert [column for column, _ in scores_of(outputs[0].numpy(), 20)[1]] == [3, 0], "none that cannot come"


# What is done on a GPU

VIEWS = ("view", "slice", "select", "unsqueeze", "split", "unbind", "alias", "detach")
LAUNCHED = {"sort": 11, "topk": 16, "cumsum": 2, "scatter_add": 2}
"""Kernels that torch launches for an operator on 8 rows of 128,256 float32, by its sources; of all others one.

`sort`: SortStable.cu, two radix sorts of all rows together, of 32 bits and of the row. `topk`: TensorTopK.cu, two
kernels for each of four digits, two scans by key, a sort of what was found. `cumsum`: ScanUtils.cuh, CUB's scan of a
vector. `scatter_add`: a copy before it.
"""


class Launches(TorchDispatchMode):
    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        self.number += 0 if name.startswith(VIEWS) else LAUNCHED.get(name, 1)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "level", "number"),
    [
        (RowSampler, Level.PLAIN, 4),
        (RowSampler, Level.FILTERED, 37),
        (RowSampler, Level.PENALIZED, 54),
        (RowSampler, Level.SCORED, 75),
        (RowRanker, Level.PLAIN, 34),
        (RowRanker, Level.FILTERED, 67),
        (RowRanker, Level.PENALIZED, 84),
    ],
)
def test_a_device_launches_few_kernels_and_is_not_asked(kind: type[RowSampler], level: Level, number: int) -> None:
    """Tensors on `meta` have no values: an operator that reads one, or whose shape depends on one, raises."""
    device = torch.device("meta")
    sampler = kind(SamplingState(128_256, None, device), level)
    logits = torch.empty((8, 128_256), dtype=torch.bfloat16, device=device)
    inputs = torch.empty((8, len(sampler.neutral)), dtype=torch.int64, device=device)
    with Launches() as launches:
        columns, outputs = sampler.compute(logits, inputs)
    assert (columns.shape, columns.dtype, columns.device) == ((8,), torch.int64, device)
    assert (outputs.shape, outputs.dtype) == ((8, sampler.num_outputs), torch.int32)
    assert launches.number == number
