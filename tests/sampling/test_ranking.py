from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from amusd.config import GREEDY, Distribution
from amusd.errors import NotFiniteError
from amusd.protocol.draft_session import Guesses
from amusd.sampling.digest import Digests
from amusd.sampling.logits import LogitsProcessor
from amusd.sampling.noise import Domain, codes_of, counters, gumbel, key_of
from amusd.sampling.ranking import UNPROPOSED, Mixture, Ranking
from amusd.sampling.sampler import TokenSampler

NUM_IDS = 700


def ids_of(ranked: Guesses) -> tuple[int, ...]:
    return tuple(token_id for token_id, _ in ranked)


def probabilities_of(ranked: Guesses) -> tuple[float, ...]:
    return tuple(probability for _, probability in ranked)


def make_for_filters(*args: Any, **kwargs: Any) -> Ranking:
    """What ranks whole rows, as if there were filters."""
    ranking = Ranking(*args, **kwargs)
    ranking._is_plain = False
    return ranking


def make_on_device(
    distribution: Distribution, vocab_size: int, output_ids: Tensor | None = None, **kwargs: Any
) -> Ranking:
    """What sees digests, as of logits on a GPU."""
    digests = Digests(vocab_size, output_ids, torch.device("cpu"))
    return Ranking(distribution, vocab_size, output_ids, **kwargs, digests=digests)


MAKERS: Sequence[Callable[..., Ranking]] = (make_for_filters, Ranking, make_on_device)
"""Whole rows, and their best tokens, where nothing but a temperature shapes the distribution, found in two ways."""
every = pytest.mark.parametrize("make", MAKERS, ids=["whole", "best", "device"])
ROUNDING = 1e-5
"""Scores that are closer than this, of logits up to 100 in size, may change places in float32."""

plain_distributions = st.builds(
    Distribution, temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]), seed=st.integers(0, 2**63 - 1)
)
distributions = plain_distributions | st.builds(
    Distribution,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.2]),
    min_p=st.sampled_from([0.0, 0.05]),
    logit_bias=st.sampled_from([(), ((3, 4.0), (650, -2.0))]),
    seed=st.integers(0, 2**63 - 1),
)


def random_logits(rng: np.random.Generator, rows: int, columns: int, scale: float) -> Tensor:
    return torch.from_numpy((rng.standard_normal((rows, columns)) * scale).astype(np.float32))


def random_ids(rng: np.random.Generator, some: bool) -> Tensor | None:
    return torch.from_numpy(np.sort(rng.permutation(NUM_IDS)[: NUM_IDS // 3])) if some else None


def exact_scores(distribution: Distribution, row: Tensor, ids: Tensor | None, position: int) -> np.ndarray:
    """[columns] float64; -inf for those that are filtered out."""
    id_list = None if ids is None else ids.numpy()
    processed, columns = LogitsProcessor(distribution, len(row), id_list).process(row.numpy())
    if distribution.temperature == 0:
        return processed.astype(np.float64)
    codes = codes_of(NUM_IDS)[np.arange(len(row)) if id_list is None else id_list]
    scores = processed + gumbel(counters(key_of(distribution.seed, position, Domain.MATCHING), codes))
    if columns is not None:
        scores[np.setdiff1d(np.arange(len(row)), columns)] = -np.inf
    return scores


@every
@settings(max_examples=50)
@given(
    distribution=distributions,
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([0.01, 1.0, 5.0, 20.0]),
    some=st.booleans(),
    number=st.integers(1, 4),
)
def test_the_first_is_what_the_sampler_chooses_and_the_others_follow_in_order(
    make: Callable[..., Ranking], distribution: Distribution, seed: int, scale: float, some: bool, number: int
) -> None:
    rng = np.random.default_rng(seed)
    ids = random_ids(rng, some)
    columns, start = NUM_IDS if ids is None else len(ids), 30
    logits = random_logits(rng, 4, columns, scale)
    ranking = make(distribution, columns, ids, number=number)
    ranked = ranking.rank(logits, range(start + 1, start + 5))
    chosen = TokenSampler(distribution, columns, ids).choose(logits, start, [0] * 4)
    id_list = list(range(columns)) if ids is None else ids.tolist()
    for index, (tokens, column) in enumerate(zip(ranked, chosen, strict=True)):
        scores = exact_scores(distribution, logits[index], ids, start + 1 + index)
        places = [id_list.index(token_id) for token_id in ids_of(tokens)]
        assert len(set(places)) == len(places)
        in_order = np.sort(scores)[::-1]
        best = in_order[: len(places)]
        assert scores[places] == pytest.approx(best, abs=ROUNDING)
        assert ids_of(tokens)[0] == id_list[column] or in_order[0] - in_order[1] < ROUNDING
        sharpness = distribution.temperature or 1.0
        expected = np.exp(sharpness * (best - best[0])) / np.exp(sharpness * (scores - best[0])).sum()
        assert probabilities_of(tokens) == pytest.approx(expected, rel=1e-3)
        if len(places) < number:  # the next one has no probability
            rest = in_order[len(places)]
            assert np.exp(np.float32(sharpness * (rest - best[0]))) < 1e-37


@every
@pytest.mark.parametrize("temperature", [0.0, 1.7])
def test_a_first_guess_is_right_as_often_as_it_says(make: Callable[..., Ranking], temperature: float) -> None:
    """Where the target's logits are the draft's and an error of Gumbel noise, whatever the temperature."""
    rng, rows, columns = np.random.default_rng(3), 1500, 200
    distribution = Distribution(temperature=temperature, seed=9)
    draft = random_logits(rng, rows, columns, 2.5)
    target = draft + torch.from_numpy(rng.gumbel(size=(rows, columns)).astype(np.float32))
    ranked = make(distribution, columns, number=1).rank(draft, range(1, rows + 1))
    chosen = TokenSampler(distribution, columns).choose(target, 0, [0] * rows)
    said = np.array([probabilities_of(tokens)[0] for tokens in ranked])
    right = np.array([ids_of(tokens)[0] == token_id for tokens, token_id in zip(ranked, chosen, strict=True)])
    assert np.std(said) > 0.1
    assert np.mean(right - said) == pytest.approx(0, abs=4 * np.std(right - said) / rows**0.5)


@pytest.mark.parametrize("row", [[0.0, np.nan, 1.0], [-np.inf, -np.inf, -np.inf]], ids=str)
def test_a_row_without_a_largest_number_is_an_error(row: list[float]) -> None:
    ranking = Ranking(Distribution(temperature=1.0), 3, number=2)
    with pytest.raises(NotFiniteError, match=f"the largest logit is {np.max(row)}$"):
        ranking.rank(torch.tensor([row]), [0])


@every
def test_the_logits_stay_as_they_are_and_may_be_bfloat16(make: Callable[..., Ranking]) -> None:
    logits = random_logits(np.random.default_rng(1), 2, NUM_IDS, 2.0).bfloat16()
    for distribution in (GREEDY, Distribution(temperature=1.0)):
        ranking = make(distribution, NUM_IDS, number=3)
        exact, before = logits.float(), logits.float()
        assert ranking.rank(logits, [3, 4]) == ranking.rank(exact, [3, 4])
        assert torch.equal(exact, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_see_the_context_of_each_row(temperature: float) -> None:
    ids = torch.tensor([2, 4, 6, 8])
    distribution = Distribution(temperature=temperature, presence_penalty=200.0)
    ranking = Ranking(distribution, 4, ids, number=4, num_prompt_tokens=2)
    assert ranking.needs_contexts
    ranked = ranking.rank(
        torch.tensor([[40.0, 30.0, 20.0, 10.0]]).expand(3, -1), [3, 3, 4], [[2, 4, 2], [2, 4, 6], [4, 6, 2, 4]]
    )
    assert [ids_of(tokens)[0] for tokens in ranked] == [4, 2, 6]
    sampler = TokenSampler(distribution, 4, ids, prompt=[2, 4])
    sampler.see([2, 4])
    assert sampler.choose(torch.tensor([[40.0, 30.0, 20.0, 10.0]]), 2, [2]) == [1]
    repeated = Ranking(Distribution(temperature=temperature, repetition_penalty=100.0), 4, ids, number=2)
    assert ids_of(repeated.rank(torch.tensor([[40.0, 30.0, 20.0, 10.0]]), [1], [[2]])[0])[0] == 4


# Mixtures


def mixed_logits(row: Tensor, ids: list[int], mixture: Mixture, all_ids: list[int]) -> np.ndarray:
    """[all_ids] float64: logarithms of the mixture's probabilities."""
    weights = dict(zip(ids, row.double().softmax(-1).tolist(), strict=True))
    for token_id, bias, slope in mixture:
        model = weights.get(token_id, 0.0) or math.exp(UNPROPOSED)
        weights[token_id] = max(weights.get(token_id, 0.0), math.exp(bias) * model**slope)
    with np.errstate(divide="ignore"):
        return np.log([weights.get(token_id, 0.0) / sum(weights.values()) for token_id in all_ids])


mixtures = st.lists(
    st.tuples(st.integers(0, NUM_IDS + 40), st.sampled_from([-3.0, -0.2, 1.1, 2.9]), st.sampled_from([0.3, 0.61, 1.4])),
    max_size=3,
    unique_by=(lambda guess: guess[0], lambda guess: guess[1]),
)


@every
@settings(max_examples=50)
@given(distribution=distributions, seed=st.integers(0, 2**32 - 1), some=st.booleans(), given_=st.lists(mixtures))
def test_a_mixture_ranks_as_a_model_with_its_probabilities_would(
    make: Callable[..., Ranking], distribution: Distribution, seed: int, some: bool, given_: list[Mixture]
) -> None:
    """One that has a column for every token, those that the draft cannot propose included."""
    rng = np.random.default_rng(seed)
    ids = random_ids(rng, some)
    columns = NUM_IDS if ids is None else len(ids)
    id_list = list(range(columns)) if ids is None else ids.tolist()
    logits = random_logits(rng, max(1, len(given_)), columns, 4.0)
    logits[:, ::7] = -math.inf  # of tokens that the draft cannot propose either
    ranking = make(distribution, columns, ids, number=4)
    ranked = ranking.rank(logits, range(7, 7 + len(logits)), (), given_)
    all_ids = sorted({*id_list, *(token_id for mixture in given_ for token_id, _, _ in mixture)})
    for index, mixture in enumerate(given_):
        whole = torch.from_numpy(mixed_logits(logits[index], id_list, mixture, all_ids).astype(np.float32))
        tensor = torch.tensor(all_ids)
        (expected,) = Ranking(distribution, len(all_ids), tensor, number=4).rank(whole.unsqueeze(0), [7 + index])
        assert probabilities_of(ranked[index]) == pytest.approx(probabilities_of(expected)[:4], rel=2e-3, abs=1e-6)
        said = dict(zip(ids_of(expected), probabilities_of(expected), strict=True))  # more: ties may change places
        for token_id, probability in zip(ids_of(ranked[index]), probabilities_of(ranked[index]), strict=True):
            assert said.get(token_id, 0.0) == pytest.approx(probability, rel=2e-3, abs=1e-5)


@every
def test_less_likely_ones_than_wanted_are_left_out(make: Callable[..., Ranking]) -> None:
    row = np.log([0.5, 0.3, 0.15, 0.05])
    logits = torch.as_tensor(row, dtype=torch.float32).unsqueeze(0)
    ranked = make(GREEDY, 4, number=4, min_probability=0.1).rank(logits, [0])[0]
    assert ids_of(ranked) == (0, 1, 2)
    assert probabilities_of(ranked) == pytest.approx((0.5, 0.3, 0.15))
