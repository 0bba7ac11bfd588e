"""The ratio test: its arithmetic, its law through the real message path, and the defects that the law must expose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling.law import MAX_LENGTH, PROMPT, VOCAB_SIZE, Experiment, PrefixModel, fit

from amusd.config import Distribution
from amusd.drafters.autoregressive import AutoregressiveDrafter
from amusd.drafters.cascade import CascadeDrafter
from amusd.protocol.messages import Candidate
from amusd.sampling import sampler as sampler_module
from amusd.sampling.acceptance import ProbabilityRow, certain, is_accepted, pack_row, residual, unpack_row
from amusd.sampling.known_rows import PassRows
from amusd.sampling.noise import Domain
from amusd.sampling.sampler import DraftSampler, TargetSampler

FEW = 3_000
"""Enough for each of the defects below: the smallest of their statistics is near 190 then, the threshold 98.

A sound sampler fails with probability 3e-10, whatever the number (`law.fit`). The statistic of a defect grows with it:
this many answers expose one whose chi-square distance from the law is above 0.05 for each answer.
"""
PLAIN = Distribution(temperature=1.0, acceptance="rejection")
TOP_3 = Distribution(temperature=0.9, top_k=3, acceptance="rejection")


def row(ids: Sequence[int], probabilities: Sequence[float]) -> ProbabilityRow:
    return ProbabilityRow(np.array(ids, dtype=np.int32), np.array(probabilities, dtype=np.float32))


# Arithmetic


def test_a_candidate_stays_with_the_probability_of_the_ratio() -> None:
    p, q = np.array([0.2, 0.5, 0.3]), row([0, 1], [0.4, 0.6])
    assert is_accepted(0, p, q, 0.499)
    assert not is_accepted(0, p, q, 0.501)
    assert is_accepted(1, p, q, 0.83)
    assert not is_accepted(1, p, q, 0.84)


def test_what_the_target_cannot_draw_is_never_accepted() -> None:
    assert not is_accepted(0, np.array([0.0, 1.0]), row([0], [1.0]), 1e-300)


def test_the_residual_is_what_p_has_more_than_q() -> None:
    p = np.array([0.2, 0.5, 0.3])
    assert residual(p, row([0, 1], [0.4, 0.6])).tolist() == [0.0, 0.0, 0.3]
    assert residual(p, row([1], [1.0])).tolist() == [0.2, 0.0, 0.3]
    assert p.tolist() == [0.2, 0.5, 0.3]


def test_equal_distributions_leave_p_itself() -> None:
    p = np.array([0.25, 0.75])
    assert residual(p, row([0, 1], [0.25, 0.75])).tolist() == [0.25, 0.75]


@given(st.lists(st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)), min_size=2, max_size=6))
def test_kept_and_resampled_together_give_p(pairs: list[tuple[float, float]]) -> None:
    """min(p, q) + P(reject) residual = p, exactly the promise of the method."""
    p, q = (np.array(values) / sum(values) for values in zip(*pairs, strict=True))
    kept = np.minimum(p, q)
    left = residual(p, row(range(len(q)), q.tolist()))
    assert np.allclose(kept + (1 - kept.sum()) * left / left.sum(), p, atol=1e-6)


def test_a_row_comes_back_from_its_bytes() -> None:
    original = row([3, 7, 9], [0.25, 0.5, 0.25])
    read = unpack_row(pack_row(original), 7, 10)
    assert read.token_ids.tolist() == [3, 7, 9]
    assert read.of(7) == 0.5
    assert read.of(8) == 0.0
    assert unpack_row(certain(4), 4, 10).of(4) == 1.0


@pytest.mark.parametrize(
    ("data", "token_id", "reason"),
    [
        (b"", 3, "0 bytes"),
        (b"1234567", 3, "7 bytes"),
        (pack_row(row([3, 7], [0.5, 0.5])), 4, "its own token, 4, is impossible"),
        (pack_row(row([3, 7], [1.0, 0.0])), 7, "its own token, 7, is impossible"),
        (pack_row(row([3, 7], [0.5, 0.4])), 3, "sum to 0.9"),
        (pack_row(row([3, 7], [1.5, -0.5])), 3, "sum to nan"),
        (pack_row(row([3, 7], [float("nan"), 0.5])), 7, "sum to nan"),
        (pack_row(row([3, 7], [float("inf"), 0.5])), 7, "sum to inf"),
        (pack_row(row([7, 3], [0.5, 0.5])), 3, "not ascending"),
        (pack_row(row([3, 3], [0.5, 0.5])), 3, "not ascending"),
        (pack_row(row([-1, 3], [0.5, 0.5])), 3, "not ascending"),
        (pack_row(row([3, 10], [0.5, 0.5])), 3, "not ascending"),
    ],
)
def test_what_cannot_be_a_row_is_refused(data: bytes, token_id: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        unpack_row(data, token_id, 10)


# The law


def check(experiment: Experiment, number: int) -> None:
    found = fit(experiment.run(number), experiment.law())
    assert experiment.num_accepted > 0
    assert experiment.num_rejected > 0
    assert found.holds, found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("number", [FEW, pytest.param(50_000, marks=pytest.mark.long)])
def test_the_first_tokens_follow_the_targets_law(asynchronous: bool, number: int) -> None:
    check(Experiment(TOP_3, asynchronous=asynchronous), number)


def cascade(middle: PrefixModel) -> CascadeDrafter:
    """`middle` judges what a model near to it drafts."""
    inner = AutoregressiveDrafter(PrefixModel(5, of=middle))  # type: ignore[arg-type]
    return CascadeDrafter(middle, inner, 2)  # type: ignore[arg-type]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "experiment",
    [
        Experiment(PLAIN),
        Experiment(PLAIN, num_speculative_tokens=1),
        Experiment(PLAIN, num_speculative_tokens=4, asynchronous=False),
        Experiment(replace(PLAIN, top_p=0.8)),
        Experiment(replace(PLAIN, temperature=1.5, min_p=0.2)),
        Experiment(replace(PLAIN, presence_penalty=1.0, repetition_penalty=1.3, logit_bias=((2, 0.7),))),
        Experiment(replace(PLAIN, frequency_penalty=0.8)),
        Experiment(PLAIN, target=(against := PrefixModel(1)), draft=PrefixModel(2, of=against, sign=-1.0)),
        Experiment(PLAIN, target=(larger := PrefixModel(3)), draft=PrefixModel(2, 3, of=larger)),
        Experiment(PLAIN, make_drafter=cascade),
        Experiment(PLAIN, make_drafter=cascade, num_speculative_tokens=4, asynchronous=False),
        Experiment(PLAIN, target=(other := PrefixModel(4)), draft=PrefixModel(2, 3, of=other, output_ids=(1, 2, 4))),
    ],
    ids=[
        "plain",
        "one",
        "four",
        "top-p",
        "min-p",
        "penalties",
        "counts",
        "draft against target",
        "draft of fewer ids",
        "cascade",
        "four of a cascade",
        "draft that shares some ids",
    ],
)
@pytest.mark.parametrize("number", [FEW, pytest.param(200_000, marks=pytest.mark.long)])
def test_the_law_holds_under_every_parameter(experiment: Experiment, number: int) -> None:
    check(experiment, number)


def test_plain_decoding_follows_the_same_law() -> None:
    experiment = Experiment(TOP_3, num_speculative_tokens=0)
    assert fit(experiment.run(FEW), experiment.law()).holds


# Defects that the law must expose


class RawProbabilities(DraftSampler):
    """Reports what it would have drawn from without top-k (transformers #47932)."""

    def _choose(self, logits: Any, position: int) -> int:
        column = super()._choose(logits, position)
        weights = np.exp(logits.astype(np.float64) / self._distribution.temperature)
        self._rows = (*self._rows[:-1], pack_row(row(range(len(logits)), (weights / weights.sum()).tolist())))
        return column


class ArgmaxDraft(DraftSampler):
    """Proposes the likeliest token as if it had been drawn (transformers #33534)."""

    def _choose(self, logits: Any, position: int) -> int:
        super()._choose(logits, position)
        return int(logits.argmax())


class OneSidedFilter(TargetSampler):
    """The target does not know about top-k (vLLM #10198)."""

    def __init__(self, distribution: Distribution, *args: Any, **kwargs: Any) -> None:
        super().__init__(replace(distribution, top_k=0), *args, **kwargs)


class SharedNoise(TargetSampler):
    """The uniform that rejected a candidate also picks the token in its place (vLLM #54282)."""

    def _resample(self, weights: Any, position: int) -> int:
        cumulative = np.cumsum(weights / weights.sum())
        used = sampler_module.uniform(self._key(position, Domain.ACCEPT))
        return int(np.searchsorted(cumulative, used))


class PreviousRow(TargetSampler):
    """The bonus token comes from the row before (vLLM #8320)."""

    def _test_ratios(self, seen: Any, start: int, block: Any, *args: Any) -> Any:
        rows = np.stack([seen.whole(row) for row in range(len(block))])
        if len(rows) > 1:
            rows = np.concatenate((rows[:-1], rows[-2:-1]))
        return super()._test_ratios(PassRows(torch.from_numpy(rows), None, None), start, block, *args)


def target_of(kind: type[TargetSampler]) -> Any:
    def make(distribution: Distribution, seed: int) -> TargetSampler:
        return kind(replace(distribution, seed=seed), VOCAB_SIZE, prompt=PROMPT)

    return make


def draft_of(monkeypatch: pytest.MonkeyPatch, kind: type[DraftSampler]) -> None:
    monkeypatch.setattr("amusd.drafters.autoregressive.DraftSampler", kind)


def is_exposed(experiment: Experiment) -> bool:
    return not fit(experiment.run(FEW), experiment.law()).holds


@pytest.mark.parametrize("kind", [RawProbabilities, ArgmaxDraft])
def test_a_row_that_is_not_what_was_drawn_from_is_exposed(
    kind: type[DraftSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_of(monkeypatch, kind)
    assert is_exposed(Experiment(TOP_3, asynchronous=False))


@pytest.mark.parametrize("kind", [OneSidedFilter, PreviousRow])
def test_a_target_that_draws_from_the_wrong_row_or_without_the_filter_is_exposed(kind: type[TargetSampler]) -> None:
    assert is_exposed(Experiment(TOP_3, asynchronous=False, make_sampler=target_of(kind)))


def test_noise_that_is_used_twice_is_exposed() -> None:
    assert is_exposed(Experiment(TOP_3, asynchronous=False, make_sampler=target_of(SharedNoise)))


def test_resampling_from_p_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE #329."""
    monkeypatch.setattr(sampler_module, "residual", lambda p, q: p)
    assert is_exposed(Experiment(TOP_3, asynchronous=False))


def test_zeroing_one_token_of_p_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right only for a draft that was certain of it."""

    def without_largest(p: Any, q: ProbabilityRow) -> Any:
        left = p.copy()
        left[q.token_ids[q.probabilities.argmax()]] = 0.0
        return left if left.any() else p

    monkeypatch.setattr(sampler_module, "residual", without_largest)
    assert is_exposed(Experiment(TOP_3, asynchronous=False))


def test_a_token_that_is_withheld_because_of_its_own_probability_is_exposed() -> None:
    def withhold(candidate: Candidate) -> Candidate:
        tokens = candidate.token_ids
        if tokens and unpack_row(candidate.draft_probs[0], tokens[0], VOCAB_SIZE).of(tokens[0]) < 0.3:
            return replace(candidate, parents=(), token_ids=(), draft_probs=(), more=False)
        return candidate

    assert is_exposed(Experiment(TOP_3, asynchronous=False, filter_offer=withhold))


def test_a_draft_that_stops_where_it_is_unsure_changes_nothing() -> None:
    """It looks at the row and not at what was drawn from it: allowed."""

    def stop(candidate: Candidate) -> Candidate:
        tokens = candidate.token_ids
        if tokens and unpack_row(candidate.draft_probs[0], tokens[0], VOCAB_SIZE).probabilities.max() < 0.5:
            return replace(candidate, parents=(), token_ids=(), draft_probs=(), more=False)
        return candidate

    experiment = Experiment(TOP_3, asynchronous=False, filter_offer=stop)
    assert fit(experiment.run(FEW), experiment.law()).holds


def test_the_drafter_of_the_experiment_is_the_real_one() -> None:
    """The mutants above replace what `AutoregressiveDrafter` would use."""
    drafter = AutoregressiveDrafter(PrefixModel(1))  # type: ignore[arg-type]
    drafter.set_distribution(TOP_3)
    drafter.open(PROMPT, MAX_LENGTH)
    assert len(drafter.propose(2)) == 2
    assert len(drafter.take_rows()) == 2
    assert drafter.take_rows() == ()
