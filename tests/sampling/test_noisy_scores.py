from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from amusd.sampling.noise import Domain, key_of


def keys_of(rows: int) -> Tensor:
    keys = np.array([key_of(5, row, Domain.MATCHING) for row in range(rows)], dtype=np.uint64)
    return torch.from_numpy(keys.view(np.int64))


IN_THE_INTERPRETER = """
import numpy as np, torch
from amusd.sampling.noise import codes_of
from amusd.sampling.noisy_scores import noisy_scores
from amusd.sampling.noisy_scores_triton import launch_noisy_scores
from tests.sampling.test_noisy_scores import keys_of
codes, keys = codes_of(2500), keys_of(3)
logits, scale = torch.randn((3, 2500)) * 4, torch.tensor([0.0, 0.7, 1.0])
for dtype in (torch.float32, torch.bfloat16):
    found = launch_noisy_scores(logits.to(dtype), codes, keys, scale)
    expected = noisy_scores(logits.to(dtype), codes, keys, scale)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[0], logits[0].to(dtype).float())
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=2e-6, atol=4e-6)
"""


def test_the_kernel_computes_the_same_in_tritons_interpreter() -> None:
    pytest.importorskip("triton")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", IN_THE_INTERPRETER]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
