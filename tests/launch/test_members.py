"""Who looks after which rank, what rank 0 refuses of those that have come, and what it prints of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from amusd.config import HardwareConfig, RunConfig, TransportConfig
from amusd.errors import ConfigError
from amusd.transport.addresses import address_towards, interface_address, interface_name
from launch.nodes import Member, check_sharing, has_ranks_elsewhere, nodes_of, plan, ranks_of, with_interface
from launch.store import Place


def members(*nodes: int, **changes: Any) -> list[Member]:
    """One process for each of `nodes`, which has the rank of the first process there; `changes` are the last one's."""
    made = [
        Member(rank=rank, node=node, host=f"10.0.0.{node}", num_gpus=2, amusd="1", torch="2")
        for rank, node in enumerate(nodes)
    ]
    return [*made[:-1], dataclasses.replace(made[-1], **changes)]


@pytest.mark.parametrize(
    ("num_processes", "num_ranks", "shares"),
    [
        (2, 1, [range(1), range(0)]),
        (2, 3, [range(3), range(0)]),  # rank 0 starts all of the target's
        (4, 3, [range(1), range(1, 2), range(2, 3), range(0)]),
        (3, 16, [range(8), range(8, 16), range(0)]),
    ],
)
def test_all_but_the_last_process_share_the_targets_ranks_evenly(
    num_processes: int, num_ranks: int, shares: list[range]
) -> None:
    assert [ranks_of(rank, num_processes, num_ranks) for rank in range(num_processes)] == shares


@pytest.mark.parametrize(("num_processes", "num_ranks"), [(4, 2), (4, 4), (3, 1)])
def test_processes_that_cannot_share_them_are_refused(num_processes: int, num_ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"^target_tensor_parallel_size={num_ranks}: .* start {num_ranks + 1} in all"):
        ranks_of(0, num_processes, num_ranks)


def test_a_machine_has_the_ranks_of_its_processes() -> None:
    config = RunConfig(target_tensor_parallel_size=3).engine()
    first, second = nodes_of(members(0, 0, 2, 2), config)
    assert (first.num_target_ranks, first.num_draft_ranks) == (2, 0)
    assert (second.num_target_ranks, second.num_draft_ranks) == (1, 1)
    assert has_ranks_elsewhere([first, second])
    assert not has_ranks_elsewhere(nodes_of(members(0, 1), RunConfig().engine()))


def test_another_version_is_refused_and_another_torch_only_where_the_target_is() -> None:
    config = RunConfig(target_tensor_parallel_size=2).engine()
    with pytest.raises(ConfigError, match=r"^rank 2 on 10\.0\.0\.2 has amusd 0, and rank 0 has 1$"):
        nodes_of(members(0, 0, 2, amusd="0"), config)
    nodes_of(members(0, 0, 2, torch="3"), config)
    *others, last = members(0, 0, 2)
    with pytest.raises(ConfigError, match=r"^rank 1 on 10\.0\.0\.0 has torch 3, and rank 0 has 2$"):
        nodes_of([others[0], dataclasses.replace(others[1], torch="3"), last], config)


def test_ranks_on_several_machines_do_not_share_a_gpu() -> None:
    config = RunConfig(target_tensor_parallel_size=3).engine()
    nodes = nodes_of(members(0, 0, 2, 2), config)
    check_sharing(nodes, ("cuda:0", "cuda:1", "cuda:0", "cuda:0"))  # the draft may share
    check_sharing(nodes, ("cpu",) * 4)
    with pytest.raises(ConfigError, match=r"2 ranks of the target on 2 GPUs; .* each needs a GPU of its own"):
        check_sharing(nodes, ("cuda:0", "cuda:0", "cuda:0", "cuda:1"))


def test_the_plan_names_each_rank_its_machine_and_device_and_how_they_talk() -> None:
    link = TransportConfig(kind="zeromq", address="tcp://10.0.0.0:1", keys="keys", interface="eth1")
    devices = HardwareConfig(devices=("cuda:0", "cuda:1", "cuda:0", "cuda:1"))
    config = RunConfig(target_tensor_parallel_size=3, hardware=devices, transport=link)
    assert list(plan(nodes_of(members(0, 0, 2, 2), config.engine()), config)) == [
        "node 0 (10.0.0.0): rank 0 of the target on cuda:0",
        "node 0 (10.0.0.0): rank 1 of the target on cuda:1",
        "node 1 (10.0.0.2): rank 2 of the target on cuda:0",
        "node 1 (10.0.0.2): the draft on cuda:1",
        "commands of rank 0: TCP, encrypted; passes: gloo or NCCL over eth1, not encrypted",
        "candidates and verdicts: transport=zeromq, tcp://10.0.0.0:1, encrypted",
    ]


def test_ranks_meet_at_the_interface_that_is_given_and_else_at_the_one_towards_rank_0() -> None:
    place = Place(rank=1, apart=True, address="127.0.0.1", port=1, is_by_itself=False, namespace="t")
    link = TransportConfig(kind="zeromq", address="tcp://127.0.0.1:1")
    assert with_interface(dataclasses.replace(link, interface="eth1"), place).interface == "eth1"
    assert with_interface(link, place).interface == "127.0.0.1"


def test_an_interface_is_found_by_its_name_and_by_its_address() -> None:
    assert interface_address("lo") == "127.0.0.1"
    assert interface_name("127.0.0.1") == "lo"
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"^transport\.interface=no-such: this machine has .*lo \(127\.0\.0\.1\)"):
        interface_address("no-such")
