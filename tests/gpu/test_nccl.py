"""NCCL on two GPUs (`make test-nccl`), since it refuses two processes on one: long messages, and one model's ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from gpu.nccl_rank import DEADLINE_SECONDS, small_model
from models.linked_ranks import lead
from passes import forward

from amusd.commands.other_worker import measure_one_way
from amusd.config import TransportConfig
from amusd.errors import PeerLostError, RankLostError
from amusd.protocol.messages import Open, Shutdown, Verdict
from amusd.runner.model_runner import ModelRunner, extend
from amusd.runner.process_group import EXCHANGE_SECONDS
from amusd.runtime.ranks import Leader
from amusd.transport.base import Transport
from amusd.transport.factory import connect, link_address

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.nccl,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]

NONCE = 0xFEEDFACE12345678
NCCL = TransportConfig(kind="nccl")
SHORT = Verdict(1, 1, 0, 0, (5,))
LONG = Open(1, 1, tuple(range(200_000)), 300_000, "embedded", 16, 1)
ECHO = """
import sys
from amusd.config import TransportConfig
from amusd.protocol.messages import Shutdown
from amusd.transport.factory import listen
link = listen(TransportConfig(kind="nccl"), sys.argv[1])
while (message := link.receive(120.0)) is not None and message != Shutdown():
    link.send(message)
link.close()
"""


@pytest.fixture
def echo() -> Iterator[subprocess.Popen[bytes]]:
    with link_address(NCCL) as address:
        process = subprocess.Popen([sys.executable, "-c", ECHO, address], cwd=Path(__file__).parents[2])
        process.address = address  # type: ignore[attr-defined]
        yield process
        process.kill()
        process.wait(20.0)


@pytest.fixture
def target(echo: subprocess.Popen[bytes]) -> Iterator[Transport]:
    link = connect(NCCL, echo.address, NONCE)  # type: ignore[attr-defined]
    assert link is not None
    link.send(SHORT)
    assert link.receive(120.0) == SHORT
    yield link
    link.close()


def test_long_and_short_messages_arrive_in_order_in_both_directions(
    target: Transport, echo: subprocess.Popen[bytes]
) -> None:
    messages = [SHORT, LONG, SHORT, SHORT, LONG, LONG] * 20
    for message in messages:
        target.send(message)
    assert [target.receive(60.0) for _ in messages] == messages


def test_the_target_survives_a_draft_that_dies_with_a_long_message_under_way(
    target: Transport, echo: subprocess.Popen[bytes]
) -> None:
    for _ in range(20):
        target.send(LONG)
    echo.kill()

    def receive_for_ever() -> None:
        while target.receive(60.0) is not None:
            pass

    with pytest.raises(PeerLostError):
        receive_for_ever()
    with pytest.raises(PeerLostError):
        target.send(Shutdown())
    assert torch.ones(3, device="cuda:0").sum().item() == 3  # no kernel is left that spins there


def test_the_link_works_between_processes_that_are_measured() -> None:
    assert measure_one_way(NCCL, num_messages=200)[0] > 0


# One model on two GPUs: its tokens, with and without graphs, and a rank that dies


DEVICES = ("cuda:0", "cuda:1")
PROMPT = [7, 40, 12, 9, 33, 21, 50, 18, 5, 44, 29]
FOUND_SECONDS = 20.0
assert FOUND_SECONDS < EXCHANGE_SECONDS, "a deadline would pass for what is found at once"


@contextmanager
def two_ranks(folder: Path, *, captures: bool, num_commands: int | None = None) -> Iterator[tuple[Leader, ModelRunner]]:
    """A leader here and a follower in a process, which dies at a command where `num_commands` says so."""
    leader = lead(folder, 2, "nccl")
    checkout = Path(__file__).parents[2]
    arguments = [str(folder), DEVICES[1], "nccl", str(int(captures)), *([] if num_commands is None else [num_commands])]
    command = [sys.executable, str(Path(__file__).with_name("nccl_rank.py")), *map(str, arguments)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(checkout)})
    try:
        model = small_model(DEVICES[0], captures=captures, ranks=leader)
        leader.await_followers(DEVICES[0], DEADLINE_SECONDS)
        yield leader, model
    finally:
        leader.close()
        try:
            code = process.wait(FOUND_SECONDS)
        finally:
            process.kill()
    assert code == (0 if num_commands is None else -signal.SIGKILL)


def decoded(model: ModelRunner) -> list[list[int]]:
    cache = model.new_cache(120)
    model.prepare(cache, steps=model.tokens_per_step)
    model.prefill(PROMPT[:-1], cache)
    chosen = [extend(model, PROMPT[-1:], cache, 24)]
    cache.truncate(20)
    return [*chosen, forward(model, PROMPT[:4], cache).choose(), extend(model, PROMPT[4:5], cache, 9)]


@pytest.mark.parametrize("captures", [False, True], ids=["computed anew", "graphs"])
def test_two_gpus_choose_what_one_does(tmp_path: Path, captures: bool) -> None:
    expected = decoded(small_model(DEVICES[0], captures=captures))
    with two_ranks(tmp_path, captures=captures) as (_, model):
        assert decoded(model) == expected
        assert decoded(model) == expected


@pytest.mark.parametrize("captures", [False, True], ids=["computed anew", "graphs"])
def test_a_rank_that_is_killed_amid_a_pass_is_named_at_once_and_the_device_goes_on(
    tmp_path: Path, captures: bool
) -> None:
    with two_ranks(tmp_path, captures=captures, num_commands=6) as (_, model):
        with ThreadPoolExecutor(1) as pool:
            passes = pool.submit(lambda: [decoded(model) for _ in range(3)])
            error = passes.exception(FOUND_SECONDS)
        assert isinstance(error, RankLostError)
        assert str(error) == "rank 1 of the target is gone"
    assert torch.ones(3, device=DEVICES[0]).sum().item() == 3  # no kernel is left that spins there
