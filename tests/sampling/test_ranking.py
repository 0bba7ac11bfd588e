"""The guesses of a draft: the tokens that the target would choose from the draft's logits, and their probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling.reference import noise, processed, softmax
from torch import Tensor

from amusd.config import GREEDY, Distribution
from amusd.protocol.draft_tree import Guesses
from amusd.sampling.ranking import UNPROPOSED, Mixture, Ranking
from amusd.sampling.sampler import SamplingState, SequenceSampler

NUM_IDS = 700
ROUNDING = 1e-4

distributions = st.builds(
    Distribution,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 2, 50]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.2]),
    min_p=st.sampled_from([0.0, 0.05]),
    logit_bias=st.sampled_from([(), ((3, 4.0), (650, -2.0))]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    seed=st.integers(0, 2**63 - 1),
)


def random_logits(rng: np.random.Generator, rows: int, columns: int, scale: float) -> Tensor:
    return torch.from_numpy((rng.standard_normal((rows, columns)) * scale).astype(np.float32))


def ids_of(ranked: Guesses) -> tuple[int, ...]:
    return tuple(token_id for token_id, _ in ranked)


def probabilities_of(ranked: Guesses) -> tuple[float, ...]:
    return tuple(probability for _, probability in ranked)


def rank(
    logits: Tensor,
    distribution: Distribution = GREEDY,
    length: int = 5,
    ids: Sequence[int] | None = None,
    mixtures: Sequence[Mixture] = (),
    **kwargs: Any,
) -> list[Guesses]:
    state = SamplingState(logits.shape[1], None if ids is None else torch.tensor(ids))
    ranking = Ranking(distribution, state, **{"number": 4, **kwargs})
    paths = [[0] * row for row in range(len(logits))]
    return ranking.rank(logits, ranking.inputs_after(length, paths, mixtures), mixtures)


def test_a_token_of_the_path_is_penalized_by_its_logit() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0]] * 2)
    before, after = rank(logits, Distribution(repetition_penalty=1.5), number=1)
    assert (ids_of(before), ids_of(after)) == ((0,), (1,))


@settings(max_examples=80)
@given(
    distribution=distributions,
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([0.01, 1.0, 5.0, 20.0]),
    some=st.booleans(),
    number=st.integers(1, 4),
)
def test_guesses_are_the_best_scores_of_the_definition(
    distribution: Distribution, seed: int, scale: float, some: bool, number: int
) -> None:
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.permutation(NUM_IDS)[: NUM_IDS // 3]).tolist() if some else [*range(NUM_IDS)]
    logits = random_logits(rng, 3, len(ids), scale)
    prompt = rng.permutation(NUM_IDS)[:30].tolist()
    for row, guesses in enumerate(rank(logits, distribution, 30, ids if some else None, prompt=prompt, number=number)):
        scores = processed(distribution, logits[row].tolist(), prompt, [0] * row, ids)
        sharpness = distribution.temperature or 1.0
        if distribution.temperature:
            scores = scores + noise(distribution.seed, 30 + row, ids)
        best = np.sort(scores)[::-1][: len(guesses)]
        assert scores[[ids.index(token_id) for token_id in ids_of(guesses)]] == pytest.approx(best, abs=ROUNDING)
        expected = softmax(scores * sharpness)
        chances = [expected[ids.index(token_id)] for token_id in ids_of(guesses)]
        assert probabilities_of(guesses) == pytest.approx(chances, rel=2e-3)
        assert 0 < len(guesses) <= number
        assert sum(probabilities_of(guesses)) <= 1 + 1e-12


@pytest.mark.parametrize("temperature", [0.0, 1.7])
def test_a_first_guess_is_right_as_often_as_it_says(temperature: float) -> None:
    """The target's logits are the draft's plus Gumbel noise, whatever the temperature."""
    rng, rows, columns = np.random.default_rng(3), 1500, 200
    distribution, state = Distribution(temperature=temperature, seed=9), SamplingState(columns)
    draft = random_logits(rng, rows, columns, 2.5)
    target = draft + torch.from_numpy(rng.gumbel(size=(rows, columns)).astype(np.float32))
    ranked = rank(draft, distribution, 1, number=1)
    sampler = SequenceSampler(distribution, state)
    chosen = sampler.sampler.compute(target, torch.from_numpy(sampler.inputs(0, [0] * rows)))[0].tolist()
    said = np.array([probabilities_of(guesses)[0] for guesses in ranked])
    right = np.array([ids_of(guesses)[0] == token_id for guesses, token_id in zip(ranked, chosen, strict=True)])
    assert np.std(said) > 0.1
    assert np.mean(right - said) == pytest.approx(0, abs=4 * np.std(right - said) / rows**0.5)


# Mixtures


def mixed_logits(row: Tensor, ids: list[int], mixture: Mixture, all_ids: list[int]) -> list[float]:
    """[all_ids]: logarithms of the mixture's probabilities."""
    weights = dict(zip(ids, row.double().softmax(-1).tolist(), strict=True))
    for token_id, bias, slope in mixture:
        model = weights.get(token_id, 0.0) or math.exp(UNPROPOSED)
        weights[token_id] = max(weights.get(token_id, 0.0), math.exp(bias) * model**slope)
    whole = sum(weights.values())
    with np.errstate(divide="ignore"):
        found: list[float] = np.log([weights.get(token_id, 0.0) / whole for token_id in all_ids]).tolist()
    return found


mixtures = st.lists(
    st.tuples(st.integers(0, NUM_IDS + 40), st.sampled_from([-3.0, -0.2, 1.1, 2.9]), st.sampled_from([0.3, 0.61, 1.4])),
    max_size=3,
    unique_by=(lambda guess: guess[0], lambda guess: guess[1]),
)


def test_a_known_token_loses_nothing_that_the_model_gives_it() -> None:
    logits = torch.tensor([[0.0, 4.0, 1.0]])
    alone, known = rank(logits), rank(logits, mixtures=[((1, -3.0, 1.4),)])
    assert dict(known[0]) == pytest.approx(dict(alone[0]))


@settings(max_examples=80)
@given(
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    seed=st.integers(0, 2**32 - 1),
    some=st.booleans(),
    given_=st.lists(mixtures, min_size=1),
)
def test_a_mixture_ranks_as_its_probabilities(temperature: float, seed: int, some: bool, given_: list[Mixture]) -> None:
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.permutation(NUM_IDS)[: NUM_IDS // 3]).tolist() if some else [*range(NUM_IDS)]
    logits = random_logits(rng, len(given_), len(ids), 4.0)
    logits[:, ::7] = -math.inf  # of tokens that the draft cannot propose either
    distribution = Distribution(temperature=temperature, seed=seed)
    ranked = rank(logits, distribution, 7, ids if some else None, given_)
    all_ids = sorted({*ids, *(token_id for mixture in given_ for token_id, _, _ in mixture)})
    for row, mixture in enumerate(given_):
        whole = torch.tensor([mixed_logits(logits[row], ids, mixture, all_ids)], dtype=torch.float32)
        (expected,) = rank(whole, distribution, 7 + row, all_ids)
        assert probabilities_of(ranked[row]) == pytest.approx(probabilities_of(expected), rel=2e-3, abs=1e-6)
        said = dict(expected)  # ties may change places
        for token_id, probability in ranked[row]:
            assert said.get(token_id, 0.0) == pytest.approx(probability, rel=2e-3, abs=1e-5)
