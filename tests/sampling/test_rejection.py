"""The ratio test: its arithmetic, its law through the real message path, and the defects that the law must expose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from sampling.law import PROMPT, VOCAB_SIZE, Experiment, PrefixModel, fit
from torch import Tensor

from amusd.config import Distribution
from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.cascade import CascadeDrafter
from amusd.protocol.messages import Candidate
from amusd.sampling.acceptance import ProbabilityRow, certain, pack_row, unpack_row
from amusd.sampling.noise import Domain, key_of, uniform
from amusd.sampling.ratio_test import DraftSampler, RatioTest, residual
from amusd.sampling.sampler import KEY, SamplingState

FEW = 1_500
"""Answers that expose each of the defects below: the least visible one needs 1,250.

A sound sampler fails with probability 3e-10, whatever the number (`law.fit`).
"""
PLAIN = Distribution(temperature=1.0, acceptance="rejection")
TOP_3 = Distribution(temperature=0.9, top_k=3, acceptance="rejection")


def row(ids: Sequence[int], probabilities: Sequence[float]) -> ProbabilityRow:
    return ProbabilityRow(np.array(ids, dtype=np.int32), np.array(probabilities, dtype=np.float32))


# Arithmetic


def acceptance(p: Sequence[float], candidate: int, q: ProbabilityRow) -> Counter[tuple[int, ...]]:
    """What becomes of one candidate, over many seeds."""
    logits, found = torch.tensor([p]).log(), Counter[tuple[int, ...]]()
    for seed in range(400):
        sampler = RatioTest(replace(PLAIN, seed=seed), SamplingState(len(p)))
        found[sampler.accept(logits, 0, sampler.rows(0, [0]), [candidate], [q]).token_ids] += 1
    return found


def test_a_candidate_stays_with_the_probability_of_the_ratio() -> None:
    found = acceptance([0.2, 0.5, 0.3], 0, row([0, 1], [0.4, 0.6]))
    assert 140 < found[0,] < 260, "one half, six standard deviations"
    assert set(found) == {(0,), (2,)}, "else what p has more than q"
    assert set(acceptance([0.0, 1.0], 0, row([0], [1.0]))) == {(1,)}
    assert set(acceptance([0.25, 0.75], 0, row([0, 1], [0.25, 0.75]))) == {(0,)}


@given(st.lists(st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)), min_size=2, max_size=6))
def test_kept_and_resampled_together_give_p(pairs: list[tuple[float, float]]) -> None:
    """min(p, q) + P(reject) residual = p, exactly the promise of the method."""
    p, q = (torch.tensor([values]).double() / sum(values) for values in zip(*pairs, strict=True))
    kept = p.minimum(q)
    left = residual(p, torch.arange(len(pairs)).unsqueeze(0), q)
    assert torch.allclose(kept + (1 - kept.sum()) * left / left.sum(), p, atol=1e-6)


def test_a_row_comes_back_from_its_bytes() -> None:
    original = row([3, 7, 9], [0.25, 0.5, 0.25])
    read = unpack_row(pack_row(original), 7, 10)
    assert read.token_ids.tolist() == [3, 7, 9]
    assert (read.of(7), read.of(8)) == (0.5, 0.0)
    assert unpack_row(certain(4), 4, 10).of(4) == 1.0


@pytest.mark.parametrize(
    ("data", "token_id", "reason"),
    [
        (b"1234567", 3, "7 bytes"),
        (pack_row(row([3, 7], [0.5, 0.5])), 4, "its own token, 4, is impossible"),
        (pack_row(row([3, 7], [1.5, -0.5])), 3, "sum to nan"),
        (pack_row(row([3, 7], [float("inf"), 0.5])), 7, "sum to inf"),
        (pack_row(row([3, 3], [0.5, 0.5])), 3, "not ascending"),
        (pack_row(row([3, 10], [0.5, 0.5])), 3, "not ascending"),
    ],
)
def test_what_cannot_be_a_row_is_refused(data: bytes, token_id: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        unpack_row(data, token_id, 10)


# The law


def cascade(middle: PrefixModel) -> CascadeDrafter:
    """`middle` judges what a model near to it drafts."""
    inner = AutoregressiveDrafter(PrefixModel(5, of=middle))  # type: ignore[arg-type]
    return CascadeDrafter(middle, inner, 2)  # type: ignore[arg-type]


def stop_where_unsure(candidate: Candidate) -> Candidate:
    """Drop candidates where the draft is unsure: this depends on its row, not on the token drawn from it."""
    tokens = candidate.token_ids
    if tokens and unpack_row(candidate.draft_probs[0], tokens[0], VOCAB_SIZE).probabilities.max() < 0.5:
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
    found = fit(experiment.run(number), experiment.law())
    assert experiment.num_accepted > 0
    assert experiment.num_rejected > 0
    assert found.holds, found


# Defects that the law must expose


class RawProbabilities(DraftSampler):
    """Reports what it would have drawn from without top-k (transformers #47932)."""

    def draw(self, logits: Tensor, words: Any) -> int:
        column = super().draw(logits, words)
        weights = (logits[0] / self.distribution.temperature).softmax(0).tolist()
        self._rows = (*self._rows[:-1], pack_row(row(range(len(weights)), weights)))
        return column


class SharedNoise(RatioTest):
    """The uniform that rejected a candidate also picks the token in its place (vLLM #54282)."""

    def rows(self, start: int, *args: Any, **kwargs: Any) -> Any:
        self._start = start
        return super().rows(start, *args, **kwargs)

    def _drawn(self, weights: Tensor, words: Any) -> Tensor:
        keys = [key_of(self.distribution.seed, self._start + 1 + row, self.domain) for row in range(9)]
        row = keys.index(int(words[0, KEY]) & (1 << 64) - 1)
        number = uniform(key_of(self.distribution.seed, self._start + 1 + row, Domain.ACCEPT))
        cumulative = (weights / weights.sum()).cumsum(1)
        return (cumulative < number).sum(1).clamp(max=weights.shape[1] - 1)


class PreviousRow(RatioTest):
    """The bonus token comes from the row before (vLLM #8320)."""

    def accept(self, logits: Tensor, *args: Any) -> Any:
        return super().accept(torch.cat((logits[:-1], logits[-2:-1])) if len(logits) > 1 else logits, *args)


def is_exposed(**changes: Any) -> bool:
    """Whether some multiple of 250 answers, at most `FEW`, does not follow the law."""
    experiment = Experiment(TOP_3, asynchronous=False, **changes)
    counts, law = Counter[tuple[int, ...]](), experiment.law()
    for first in range(0, FEW, 250):
        counts += experiment.run(250, first)
        if not fit(counts, law).holds:
            return True
    return False


def test_a_row_that_is_not_what_was_drawn_from_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amusd.drafters.autoregressive.DraftSampler", RawProbabilities)
    assert is_exposed()


@pytest.mark.parametrize("kind", [PreviousRow, SharedNoise])
def test_a_target_with_the_wrong_row_or_noise_is_exposed(kind: type[RatioTest]) -> None:
    assert is_exposed(make_sampler=lambda distribution: kind(distribution, SamplingState(VOCAB_SIZE), PROMPT))


def test_a_wrong_residual_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE issue 329."""
    monkeypatch.setattr("amusd.sampling.ratio_test.residual", lambda p, *_: p)
    assert is_exposed()


@pytest.mark.long
def test_a_token_that_is_withheld_because_of_its_own_probability_is_exposed() -> None:
    def withhold(candidate: Candidate) -> Candidate:
        tokens = candidate.token_ids
        if tokens and unpack_row(candidate.draft_probs[0], tokens[0], VOCAB_SIZE).of(tokens[0]) < 0.3:
            return structs.replace(candidate, parents=(), token_ids=(), draft_probs=(), more=False)
        return candidate

    assert is_exposed(filter_offer=withhold)
