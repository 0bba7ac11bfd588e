from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amusd.config import Distribution
from amusd.protocol.verification import Block
from amusd.sampling.acceptance import Acceptance, certain, unpack_row
from amusd.sampling.logits import LogitsProcessor
from amusd.sampling.matching import NoisyArgmax
from amusd.sampling.noise import Domain, codes_of, counters, gumbel, key_of
from amusd.sampling.sampler import TargetSampler, TokenSampler

LOGITS = np.array([2.0, -1.0, 0.5, 1.0, -3.0, 0.5], dtype=np.float32)
SIZES = (2, 17, 5000)


def kept(**parameters: Any) -> set[int]:
    _, columns = LogitsProcessor(Distribution(temperature=1.0, **parameters), len(LOGITS)).process(LOGITS)
    return set(range(len(LOGITS))) if columns is None else set(columns.tolist())


def left(row: np.ndarray, **parameters: Any) -> np.ndarray:
    """[columns]: whether each is left."""
    _, columns = LogitsProcessor(Distribution(temperature=1, **parameters), len(row)).process(row)
    found = np.full(len(row), columns is None)
    if columns is not None:
        assert (np.diff(columns) > 0).all()
        found[columns] = True
    return found


def draw(row: np.ndarray, key: int, columns: np.ndarray | None = None) -> int:
    return NoisyArgmax(codes_of(len(row)))(row, columns, key)


def random_row(seed: int, size: int, scale: float) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


# What the logits become


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 3, 2, 5}),  # ties with the third stay
        ({"top_k": 99}, {0, 1, 2, 3, 4, 5}),
        ({"top_p": 1e-9}, {0}),
        ({"top_p": 0.6}, {0, 3}),
        ({"top_p": 0.75}, {0, 3, 2}),  # of two equal ones the first
        ({"top_p": 1.0}, {0, 1, 2, 3, 4, 5}),
        ({"min_p": 1.0}, {0}),
        ({"min_p": 0.3}, {0, 3}),
        ({"top_k": 2, "min_p": 0.01}, {0, 3}),
        ({"top_k": 3, "top_p": 0.7}, {0, 3}),  # the mass is that of what top-k left
    ],
)
def test_filters_keep_what_they_should(parameters: dict[str, Any], expected: set[int]) -> None:
    assert kept(**parameters) == expected


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from(SIZES),
    scale=st.sampled_from([0.001, 1.0, 8.0, 300.0]),
    top_k=st.integers(1, 60),
    top_p=st.floats(0.01, 0.999),
)
def test_filters_agree_with_sorting_everything(seed: int, size: int, scale: float, top_k: int, top_p: float) -> None:
    row = random_row(seed, size, scale)
    by_k = left(row, top_k=top_k)
    assert np.array_equal(by_k, row >= np.sort(row)[::-1][min(top_k, size) - 1])
    by_p = left(row, top_p=top_p)
    order = np.argsort(-row, kind="stable")
    weights = np.exp(row[order] - row.max(), dtype=np.float32).astype(np.float64)
    before = np.cumsum(weights) - weights
    doubtful = np.abs(before / weights.sum() - top_p) < 1e-6  # sums in another order
    expected = before < top_p * weights.sum()
    assert np.array_equal(by_p[order][~doubtful], expected[~doubtful])


@settings(max_examples=60)
@given(
    prompt=st.lists(st.integers(0, 11), max_size=12),
    answer=st.lists(st.integers(0, 11), max_size=12),
    repetition=st.sampled_from([0.5, 1.0, 2.0]),
    presence=st.sampled_from([-1.5, 0.0, 0.25]),
    frequency=st.sampled_from([-0.5, 0.0, 0.75]),
    ids=st.sampled_from([None, (5, 2, 9, 0, 11, 3)]),
)
def test_penalties_are_those_of_counting_token_by_token(
    prompt: list[int],
    answer: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    ids: tuple[int, ...] | None,
) -> None:
    """OpenAI's and vLLM's definition; tokens that no column scores are not looked at."""
    distribution = Distribution(
        temperature=1, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    processor = LogitsProcessor(distribution, len(LOGITS), None if ids is None else np.array(ids))
    row, columns = processor.process(LOGITS, prompt, answer)
    expected = []
    for logit, token_id in zip(LOGITS.tolist(), ids or range(len(LOGITS)), strict=True):
        if token_id in prompt + answer:
            logit = logit / repetition if logit > 0 else logit * repetition  # noqa: PLW2901
        expected.append(logit - frequency * answer.count(token_id) - presence * (token_id in answer))
    assert columns is None
    assert row.tolist() == expected  # all of them are numbers of few bits


# What is drawn


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from(SIZES),
    scale=st.sampled_from([0.0, 0.01, 1.0, 8.0, 100.0, 1e5]),
    cut=st.booleans(),
)
def test_the_short_cut_finds_the_noisy_argmax_of_all_columns(seed: int, size: int, scale: float, cut: bool) -> None:
    row = random_row(seed, size, scale)
    columns = np.flatnonzero(row >= np.median(row)) if cut else None
    key = key_of(seed, 3, Domain.MATCHING)
    scores = row.astype(np.float64) + gumbel(counters(key, codes_of(size)))
    if columns is not None:
        scores[np.setdiff1d(np.arange(size), columns)] = -np.inf
    assert draw(row, key, columns) == int(scores.argmax())


def test_draws_follow_the_softmax() -> None:
    temperature, num_draws = 2.0, 10_000
    sampler = TokenSampler(Distribution(temperature=temperature, seed=5), len(LOGITS))
    rows = torch.from_numpy(LOGITS).expand(500, -1)
    counts: Counter[int] = Counter()
    for start in range(0, num_draws, 500):
        counts.update(sampler.choose(rows, start, [0] * 500))
    p = np.exp(LOGITS.astype(np.float64) / temperature)
    expected = num_draws * p / p.sum()
    statistic = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in range(len(LOGITS)))
    assert statistic < 5 + 10 * 10**0.5  # ten standard deviations above five degrees of freedom


def test_a_draw_depends_on_seed_and_position_and_not_on_its_block() -> None:
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(0))
    sampler = TokenSampler(Distribution(temperature=1.0, seed=3), 300)
    whole = sampler.choose(logits, 10, [1] * 40)
    parts: list[int] = []
    for start, stop in ((0, 1), (1, 8), (8, 9), (9, 40)):
        parts += sampler.choose(logits[start:stop], 10 + start, [1] * (stop - start))
    assert whole == parts
    assert sampler.choose(logits, 10, [1] * 40) == whole  # again, as after a rollback
    assert sampler.choose(logits, 11, [1] * 40) != whole
    assert TokenSampler(Distribution(temperature=1.0, seed=4), 300).choose(logits, 10, [1] * 40) != whole


def test_draft_and_target_agree_as_often_as_the_coupling_promises() -> None:
    """At least (1 - TV) / (1 + TV), at most 1 - TV; independent draws would agree far less often."""
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(50, generator=generator) * 2
    draft = target + torch.randn(50, generator=generator)
    output_ids = torch.arange(0, 50, 2)
    p, q = target.double().softmax(0), torch.zeros(50, dtype=torch.float64)
    q[output_ids] = draft[output_ids].double().softmax(0)
    distance = float((p - q).abs().sum() / 2)
    number = 4_000
    distribution = Distribution(temperature=1.0, seed=9)
    ours = TokenSampler(distribution, 50).choose(target.expand(number, -1), 0, [0] * number)
    columns = TokenSampler(distribution, 25, output_ids).choose(draft[output_ids].expand(number, -1), 0, [0] * number)
    theirs = output_ids[columns].tolist()
    agreed = sum(a == b for a, b in zip(ours, theirs, strict=True)) / number
    margin = 5 * (0.25 / number) ** 0.5
    assert (1 - distance) / (1 + distance) - margin < agreed < 1 - distance + margin
    assert agreed > float((p * q).sum()) + 0.05


def test_penalties_see_the_tokens_before_each_row_and_forget_those_cut_off() -> None:
    distribution = Distribution(presence_penalty=100.0)
    sampler = TokenSampler(distribution, 4, prompt=[3])
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).expand(3, -1)
    assert sampler.choose(logits, 0, [3, 0, 1]) == [0, 1, 2]
    assert sampler.choose(logits[:2], 1, [2, 0]) == [0, 1]  # the first block was rejected
    sampler.see([3, 1, 0, 2])
    assert sampler.choose(logits[:1], 3, [2]) == [3]


@pytest.mark.parametrize("rule", ["greedy", "matching", "rejection"])
def test_the_first_pass_does_not_penalize_the_presence_of_the_prompts_last_token(rule: Any) -> None:
    """By hand: each row gives the likeliest token that the answer does not hold yet, the prompt's own included."""
    temperature = 0.0 if rule == "greedy" else 0.01  # the next one is less likely by a factor of exp(100)
    distribution = Distribution(temperature=temperature, presence_penalty=100.0, acceptance=rule, seed=1)
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).expand(3, -1)
    prompt = [1, 0]
    assert TokenSampler(distribution, 4, prompt=prompt).choose(logits, 1, [0, 0, 1]) == [0, 1, 2]
    rows = [unpack_row(certain(token_id), token_id, 4) for token_id in (0, 1)] if rule == "rejection" else []
    target = TargetSampler(distribution, 4, prompt=prompt)
    assert target.accept(logits, 1, [0, 0, 1], [0, 1], rows) == Acceptance((0, 1, 2), 2)
    if rule != "rejection":
        block = Block(1, 0, (0, 1))
        assert TargetSampler(distribution, 4, prompt=prompt).accept_paths(logits, block)[0] == Acceptance((0, 1, 2), 2)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from(SIZES),
    scale=st.sampled_from([0.0, 0.5, 8.0, 300.0]),
    number=st.integers(1, 20),
    rule=st.sampled_from(["greedy", "matching", "rejection"]),
)
def test_the_most_likely_tokens_are_those_of_sorting_everything(
    seed: int, size: int, scale: float, number: int, rule: Any
) -> None:
    row = np.round(random_row(seed, size, scale), 1)  # some are equal
    distribution = Distribution(
        temperature=0.0 if rule == "greedy" else 0.8, acceptance=rule, presence_penalty=3.0, seed=seed
    )
    sampler = TargetSampler(distribution, size, logprobs=True, top_logprobs=number)
    acceptance = sampler.accept(torch.from_numpy(row).unsqueeze(0), 0, [0], [])
    exact = row.astype(np.float64)
    exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
    expected = sorted(range(size), key=lambda column: (-row[column], column))[:number]
    [top] = sampler.top_logprobs
    assert [column for column, _ in top] == expected
    assert [logprob for _, logprob in top] == pytest.approx(exact[expected].tolist(), abs=1e-9)
    assert dict(top).get(acceptance.token_ids[0], sampler.logprobs[0]) == sampler.logprobs[0]
