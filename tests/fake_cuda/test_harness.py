"""The fake GPUs themselves: they are as strict, and as forgetful of other devices, as real ones."""

from __future__ import annotations

import pytest
import torch
from fake_cuda.device import fake_cuda
from fake_cuda.record import StreamId


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


def test_a_graph_repeats_its_work_on_the_memory_as_it_is_then() -> None:
    with fake_cuda(values=True) as gpus:
        host = torch.zeros(2, pin_memory=True)
        source = torch.ones(2, device="cuda:0")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            doubled = source * 2
            host.copy_(doubled, non_blocking=True)
        source.fill_(5)
        graph.replay()
        assert host.tolist() == [10, 10]
        assert doubled.tolist() == [10, 10]
        assert [len(graph.nodes) for graph in gpus.graphs] == [2]
        assert gpus.record.replays[0].stream == StreamId(0, 0)


def test_work_of_another_device_than_the_captured_one_is_missing_from_the_graph() -> None:
    with fake_cuda(values=True) as gpus:
        source = torch.ones(2, device="cuda:1")
        total = torch.zeros(2, device="cuda:1")
        graph = torch.cuda.CUDAGraph()
        with pytest.warns(UserWarning, match="empty"), torch.cuda.graph(graph):
            total += source
        graph.replay()
        assert total.tolist() == [1, 1]  # of the first time, and of no replay
        assert gpus.graphs[0].is_empty
        assert gpus.graphs[0].stream.device == 0
        with torch.cuda.device(1), torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            total += source
        graph.replay()
        assert total.tolist() == [3, 3]


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
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            tensor += 1
            with pytest.raises(RuntimeError, match="not permitted"):
                read(tensor)  # type: ignore[operator]
