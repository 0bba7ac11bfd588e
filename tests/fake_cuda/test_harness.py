"""The fake GPUs themselves: as strict as real ones, also about work of another device in a graph."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from fake_cuda.device import fake_cuda
from gpu.nccl_rank import small_model
from gpu.test_nccl import decoded
from models.fake_nccl import FakeNccl

from amusd.runner.process_group import ProcessGroup
from experiments.gpu_proof import smoke
from experiments.gpu_proof.plan import GPU, SCALES
from experiments.gpu_proof.records import Job, read_records, writer


def test_only_copies_between_pinned_memory_and_a_device_do_not_block() -> None:
    with fake_cuda() as gpus:
        tensor = torch.empty(3, device="cuda:1")
        for host in (torch.zeros(3), torch.zeros(3, pin_memory=True)):
            for non_blocking in (False, True):
                tensor.copy_(host, non_blocking=non_blocking)
                host.copy_(tensor, non_blocking=non_blocking)
        blocking = [True, True, True, True, True, True, False, False]
        assert [copy.is_blocking for copy in gpus.record.copies] == blocking
        with gpus.recorded() as part:
            tensor.tolist(), tensor[0].item(), tensor.cpu(), tensor[torch.tensor([0, 1])]
        assert [(copy.direction, copy.num_bytes) for copy in part.blocking_copies] == [
            ("out", 12), ("out", 4), ("out", 12), ("in", 16),
        ]  # fmt: skip
        assert gpus.record.devices == {1}


@pytest.mark.parametrize(
    "read",
    [
        lambda tensor: tensor.tolist(),
        lambda tensor: bool(tensor[0] > 0),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: tensor.cpu(),
        lambda tensor: torch.equal(tensor, tensor),
        lambda tensor: torch.cuda.synchronize(),
    ],
)
def test_what_waits_for_the_device_fails_inside_a_capture(read: object) -> None:
    with fake_cuda(values=True):
        tensor = torch.ones(2, device="cuda:0")
        read(tensor)  # type: ignore[operator]  # a lambda of the list above
        with torch.cuda.graph(torch.cuda.CUDAGraph(), None, torch.cuda.Stream()):
            tensor += 1
            with pytest.raises(RuntimeError, match="not permitted"):
                read(tensor)  # type: ignore[operator]


def test_pinned_memory_that_is_written_before_a_wait_and_memory_of_other_graphs_are_found() -> None:
    with fake_cuda(values=True):
        device, host, event = torch.zeros(2, device="cuda:0"), torch.ones(2, pin_memory=True), torch.cuda.Event()
        device.copy_(host, non_blocking=True)
        event.record()
        assert event.query()
        host.fill_(3)
        device.copy_(host, non_blocking=True)
        host.fill_(4)
        event.record()
        with pytest.raises(AssertionError, match="written while it was copied"):
            event.query()
        graphs, made = [torch.cuda.CUDAGraph() for _ in range(2)], []
        for graph in graphs:
            with torch.cuda.graph(graph, None, torch.cuda.Stream()):
                made.append(device + 1)
        for graph in graphs:
            graph.replay()
        assert [each.isnan().any().item() for each in made] == [True, False]


def test_operators_give_on_meta_the_shapes_that_they_give_on_a_cpu() -> None:
    for name, compute, operands in smoke.kernel_cases(torch.bfloat16):
        found = compute(*(operand.to("meta") for operand in operands)), compute(*operands)
        shapes, expected = ([(each.shape, each.dtype, each.stride()) for each in results] for results in found)
        assert shapes == expected, name


def test_the_tests_of_two_gpus_decode_with_and_without_graphs() -> None:
    with fake_cuda(values=True):
        computed_anew, graphs = (decoded(small_model("cuda:0", captures=captures)) for captures in (False, True))
    assert graphs == computed_anew


# The steps of the GPU proof's `smoke`, as they run on a GPU


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
