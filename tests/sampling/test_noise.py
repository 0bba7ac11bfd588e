"""The noise of sampling: its numbers and their law, and scores with it in Triton's kernel as in torch's operators."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from amusd.sampling.noise import Domain, codes_of, counters, gumbel, key_of, noisy_scores
from tests.models.triton_process import TritonProcess

EULER_GAMMA = 0.5772156649015329


def row(seed: int, position: int, domain: Domain = Domain.MATCHING) -> np.ndarray:
    return counters(codes_of(1 << 16).numpy().view(np.uint32), key_of(seed, position, domain))


def chi_square(counts: np.ndarray, expected: float) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def passes(statistic: float, degrees: int) -> bool:
    """Below df + 10 sqrt(2 df): ten standard deviations, so that a sound generator never fails."""
    return statistic < degrees + 10 * (2 * degrees) ** 0.5


def test_the_numbers_of_this_version_do_not_change() -> None:
    """Answers with a seed are promised to stay the same: a change here has to be announced."""
    assert row(7, 100)[[0, 1, 2, 49151]].tolist() == [150772944, 657981256, 2795102700, 239838332]
    assert key_of(7, 100, Domain.MATCHING) == 9615059052154291532


def test_codes_belong_to_ids_one_to_one_in_a_vocabulary_of_any_size() -> None:
    assert len(codes_of(200_000).unique()) == 200_000
    assert torch.equal(codes_of(1000), codes_of(1200)[:1000])


NEIGHBOURS = {
    "position": (row(1, 5), row(1, 6)),
    "seed": (row(1, 5), row(2, 5)),
    "id": (row(1, 5)[:-1], row(1, 5)[1:]),
    "matching, draft": (row(1, 5), row(1, 5, Domain.DRAFT)),
    "accept, resample": (row(1, 5, Domain.ACCEPT), row(1, 5, Domain.RESAMPLE)),
    "high half of the seed": (row(1, 5), row(1 + (1 << 40), 5)),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_numbers_that_differ_in_one_thing_are_independent(name: str) -> None:
    one, other = NEIGHBOURS[name]
    for shift in (0, 28):  # the lowest and the highest four bits
        cells = ((one >> np.uint32(shift)) & np.uint32(15)) * 16 + ((other >> np.uint32(shift)) & np.uint32(15))
        assert passes(chi_square(np.bincount(cells, minlength=256), len(cells) / 256), 255)


def test_gumbel_noise_has_its_mean_and_variance_and_its_tail() -> None:
    noise = gumbel(np.concatenate([row(1, position) for position in range(20)]))  # 1.3 million
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - EULER_GAMMA) < 10 * np.pi / 6**0.5 / len(noise) ** 0.5
    assert abs(noise.var() - np.pi**2 / 6) < 0.05
    for level in (2.0, 5.0, 8.0):
        expected = -np.expm1(-np.exp(-level)) * len(noise)
        assert abs((noise > level).sum() - expected) < 10 * expected**0.5


def compare() -> None:
    """In Triton's interpreter."""
    from amusd.sampling import noise_triton

    keys = np.array([key_of(5, row, Domain.MATCHING) for row in range(3)], dtype=np.uint64)
    codes, keys_of_rows = codes_of(2500), torch.from_numpy(keys.view(np.int64))
    logits, scale = torch.randn((3, 2500)) * 4, torch.tensor([0.0, 0.7, 1.0])
    for dtype in (torch.float32, torch.bfloat16):
        found = noise_triton.noisy_scores(logits.to(dtype), codes, keys_of_rows, scale)
        expected = noisy_scores(logits.to(dtype), codes, keys_of_rows, scale)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[0], logits[0].to(dtype).float())
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=2e-6, atol=4e-6)


def test_the_kernel_computes_the_same_in_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    with TritonProcess() as process:
        process.call(compare)
