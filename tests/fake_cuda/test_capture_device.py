"""A worker on the second GPU captures, replays and waits there, and touches no other one."""

from __future__ import annotations

import pytest
from fake_cuda import builders
from fake_cuda.device import fake_cuda
from fake_cuda.workers import Target, TreeDraft

from amusd.drafters.autoregressive import AutoregressiveDrafter

PROMPT = [5, 17, 4, 90, 33, 8, 61, 2, 9, 44]


def draft_a_chain(device: str) -> None:
    drafter = AutoregressiveDrafter(builders.draft(device))
    drafter.open(PROMPT, 64)
    drafter.propose((), 4)


def draft_a_tree(device: str) -> None:
    draft = TreeDraft(builders.draft(device))
    draft.open(PROMPT, 64)
    draft.step(2)


def verify(device: str) -> None:
    target = Target(builders.target(device))
    target.open(PROMPT)
    target.verify([1, 2, 3])


def verify_paths(device: str) -> None:
    target = Target(builders.target(device, fixed=False))
    target.open(PROMPT)
    target.verify([1, 2, 3], [4, 5])


@pytest.mark.parametrize("work", [draft_a_chain, draft_a_tree, verify, verify_paths])
def test_a_worker_does_everything_on_its_own_device(work: object) -> None:
    with fake_cuda() as gpus:
        work("cuda:1")  # type: ignore[operator]  # one of the functions above
    assert gpus.graphs
    assert gpus.record.devices == {1}
    assert not any(graph.is_empty for graph in gpus.graphs)
    assert gpus.record.replays
    assert gpus.record.waits
