"""The ratio test: its arithmetic, and its law through the real message path (defects it exposes: `mutation.rules`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec import structs
from sampling.law import VOCAB_SIZE, Experiment, PrefixModel, check_fit

from amusd.config import Distribution
from amusd.drafters.cascade import CascadeDrafter
from amusd.drafters.model import ModelDrafter
from amusd.protocol.messages import Candidate
from amusd.sampling.acceptance import RatioTest, TokenProbs, certain, unpack_probs
from amusd.sampling.sampler import SamplingState

FEW = 1_500
"""Answers that expose each defect of `mutation.rules`.

A sound sampler fails with probability 3e-10, whatever the number (`law.check_fit`).
"""
PLAIN = Distribution(temperature=1.0, acceptance="rejection")
TOP_3 = Distribution(temperature=0.9, top_k=3, acceptance="rejection")


def row(ids: Sequence[int], probabilities: Sequence[float]) -> TokenProbs:
    return TokenProbs(np.array(ids, dtype=np.int32), np.array(probabilities, dtype=np.float32))


# Arithmetic


def acceptance(p: Sequence[float], candidate: int, q: TokenProbs) -> Counter[tuple[int, ...]]:
    """The outcomes of one candidate, over many seeds."""
    logits, found = torch.tensor([p]).log(), Counter[tuple[int, ...]]()
    for seed in range(400):
        sampler = RatioTest(replace(PLAIN, seed=seed), SamplingState(len(p)))
        found[sampler.accept(logits, 0, sampler.inputs(0, [0]), [candidate], [q]).token_ids] += 1
    return found


def test_a_candidate_stays_with_the_probability_of_the_ratio() -> None:
    found = acceptance([0.2, 0.5, 0.3], 0, row([0, 1], [0.4, 0.6]))
    assert 140 < found[0,] < 260, "one half, six standard deviations"
    assert set(found) == {(0,), (2,)}, "else what p has more than q"
    assert set(acceptance([0.0, 1.0], 0, row([0], [1.0]))) == {(1,)}
    assert set(acceptance([0.25, 0.75], 0, row([0, 1], [0.25, 0.75]))) == {(0,)}


def test_draft_probabilities_come_back_from_their_bytes() -> None:
    original = row([3, 7, 9], [0.25, 0.5, 0.25])
    read = unpack_probs(original.pack(), 7, 10)
    assert read.token_ids.tolist() == [3, 7, 9]
    assert (read.of(7), read.of(8)) == (0.5, 0.0)
    assert unpack_probs(certain(4), 4, 10).of(4) == 1.0


@pytest.mark.parametrize(
    ("data", "token_id", "reason"),
    [
        (b"1234567", 3, "7 bytes"),
        (row([3, 7], [0.5, 0.5]).pack(), 4, "their own token, 4, is impossible"),
        (row([3, 7], [1.5, -0.5]).pack(), 3, "sum to nan"),
        (row([3, 7], [float("inf"), 0.5]).pack(), 7, "sum to inf"),
        (row([3, 3], [0.5, 0.5]).pack(), 3, "not ascending"),
        (row([3, 10], [0.5, 0.5]).pack(), 3, "not ascending"),
        (row([0, 2**31 - 1, 2 - 2**31, 1], [0.25] * 4).pack(), 0, "not ascending"),  # differences that overflow are not
    ],
)
def test_impossible_draft_probabilities_are_refused(data: bytes, token_id: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        unpack_probs(data, token_id, 10)


# The law


def cascade(middle: PrefixModel) -> CascadeDrafter:
    """`middle` judges the candidates of a model near to it."""
    inner = ModelDrafter(PrefixModel(5, of=middle))  # type: ignore[arg-type]
    return CascadeDrafter(middle, inner)  # type: ignore[arg-type]


def stop_where_unsure(candidate: Candidate) -> Candidate:
    """Drop candidates where the draft is unsure: this depends on its row, not on the token drawn from it."""
    tokens = candidate.token_ids
    if tokens and unpack_probs(candidate.draft_probs[0], tokens[0], VOCAB_SIZE).probabilities.max() < 0.5:
        return structs.replace(candidate, parents=(), token_ids=(), draft_probs=(), more=False)
    return candidate


AGAINST, OTHER = PrefixModel(1), PrefixModel(4)
EXPERIMENTS = {
    "top-k": Experiment(TOP_3),
    "penalties, draft that shares some ids": Experiment(
        replace(PLAIN, presence_penalty=1.0, frequency_penalty=0.8, logit_bias=((2, 0.7),)),
        target=OTHER,
        draft=PrefixModel(2, 3, of=OTHER, output_ids=(1, 2, 4)),
    ),
    "cascade": Experiment(
        PLAIN, make_drafter=cascade, num_speculative_tokens=4, asynchronous=False, filter_offer=stop_where_unsure
    ),
    "one candidate": Experiment(PLAIN, num_speculative_tokens=1, asynchronous=False),
    "filters": Experiment(replace(PLAIN, temperature=1.5, top_p=0.8, min_p=0.2), num_speculative_tokens=4),
    "draft against target": Experiment(PLAIN, target=AGAINST, draft=PrefixModel(2, of=AGAINST, sign=-1.0)),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "number"),
    [(name, FEW) for name in [*EXPERIMENTS][:2]]
    + [pytest.param(name, 50_000, marks=pytest.mark.long) for name in EXPERIMENTS],
)
def test_the_law_holds_under_every_parameter(name: str, number: int) -> None:
    experiment = EXPERIMENTS[name]
    check_fit(experiment.run(number), experiment.law())
    assert experiment.num_accepted > 0
    assert experiment.num_rejected > 0
