"""The steps of the GPU proof's `smoke`, as they run on a GPU, over doubles of the device and of NCCL."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from fake_cuda.device import fake_cuda
from models.fake_nccl import FakeNccl

from amusd.runner.process_group import ProcessGroup
from experiments.gpu_proof import smoke
from experiments.gpu_proof.plan import GPU, SCALES
from experiments.gpu_proof.records import Job, read_records, writer


def test_every_step_asks_a_gpu_for_what_it_can_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessGroup, "_make", lambda *_: FakeNccl())
    scale = replace(SCALES[GPU], target="smollm2-135m-slice")
    with mock.patch.dict(os.environ), fake_cuda(values=True) as gpus:
        smoke.smoke(Job(scale, writer(tmp_path / "smoke.jsonl"), tmp_path, "smoke"))
    found = read_records(tmp_path / "smoke.jsonl")
    assert not any("absent" in record for record in found)
    assert [record["captured"] for record in found if record["kind"] == "sampler"] == [True] * 6
    (group,) = (record for record in found if record["kind"] == "group")
    assert (group["backend"], group["exchanged"], group["replayed"], group["aborted"]) == ("nccl", True, True, True)
    assert len(gpus.record.captures) == 7  # samplers and rankers of three levels, and the exchanges
