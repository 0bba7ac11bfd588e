"""The Triton kernel of noisy scores against torch's operators."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from amusd.sampling.noise import Domain, codes_of, key_of
from amusd.sampling.noisy_scores import noisy_scores
from tests.models.triton_process import TritonProcess


def compare() -> None:
    """In Triton's interpreter."""
    from amusd.sampling import noisy_scores_triton

    keys = np.array([key_of(5, row, Domain.MATCHING) for row in range(3)], dtype=np.uint64)
    codes, keys_of_rows = codes_of(2500), torch.from_numpy(keys.view(np.int64))
    logits, scale = torch.randn((3, 2500)) * 4, torch.tensor([0.0, 0.7, 1.0])
    for dtype in (torch.float32, torch.bfloat16):
        found = noisy_scores_triton.noisy_scores(logits.to(dtype), codes, keys_of_rows, scale)
        expected = noisy_scores(logits.to(dtype), codes, keys_of_rows, scale)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[0], logits[0].to(dtype).float())
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=2e-6, atol=4e-6)


def test_the_kernel_computes_the_same_in_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    with TritonProcess() as process:
        process.call(compare)
