"""Two nodes that a cable connects: ranks of the target under torchrun, or `amusd draft`; and faults."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from amusd.errors import ConfigError
from amusd.transport.curve import write_keys
from experiments.link_delay.run import ip, two_machines
from tests.launch.processes import BLOCKS, SECONDS, amusd_command, environment, run, torchrun_command
from tests.launch.small_pair import PROMPT, plain_answer

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

ADDRESSES = ("10.77.0.1", "10.77.0.2")
NUM_TOKENS = 200
CABLE_SECONDS = 30.0
END_SECONDS = 60.0


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    with ExitStack() as stack:
        try:
            names = stack.enter_context(two_machines(ADDRESSES))
        except ConfigError as error:
            pytest.skip(f"needs the right to make network namespaces: {error}")
        yield names


@contextmanager
def running(folder: Path, small_pair: list[str], nodes: tuple[str, str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """torchrun on both nodes, whose answer has begun: rank 0 on the first one, rank 1 and the draft on the other."""
    write_keys(folder / "keys")
    asked = [*small_pair, f"prompt={PROMPT}", f"sampling.max_new_tokens={NUM_TOKENS}", "run_dir=out"]
    asked += ["target_tensor_parallel_size=2", f"transport.keys={folder / 'keys'}"]
    asked += [f"transport.address=tcp://{ADDRESSES[0]}:29501", *BLOCKS]
    with ExitStack() as stack:
        started = []
        for number, name in enumerate(nodes):
            (own := folder / f"node {number}").mkdir()
            flags = ["--nnodes=2", f"--node-rank={number}", f"--master-addr={ADDRESSES[0]}", "--master-port=29500"]
            with (own / "errors").open("w") as said:
                process = subprocess.Popen(
                    ["ip", "netns", "exec", name, *torchrun_command(*asked, flags=flags, num_processes=number + 1)],
                    cwd=own,
                    env=environment(),
                    stdout=subprocess.PIPE,
                    stderr=said,
                    bufsize=0,
                )
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        assert started[0].stdout is not None
        assert started[0].stdout.read(1), errors(folder, 0)
        yield started


def errors(folder: Path, node: int) -> str:
    return (folder / f"node {node}" / "errors").read_text()


def await_end(processes: list[psutil.Process]) -> None:
    """Fail unless all of them end."""
    deadline = time.monotonic() + END_SECONDS
    while left := [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_killed_draft_is_replaced_and_costs_no_token(
    tmp_path: Path, small_pair: list[str], nodes: tuple[str, str]
) -> None:
    with running(tmp_path, small_pair, nodes) as (first, other):
        psutil.Process(other.pid).children(recursive=True)[-1].kill()
        assert [process.wait(SECONDS) for process in (first, other)] == [0, 0], errors(tmp_path, 0)
    result = json.loads((tmp_path / "node 0" / "out" / "result.json").read_text())
    assert tuple(result["token_ids"]) == plain_answer(small_pair, NUM_TOKENS)
    assert result["metrics"]["num_draft_tokens"] > 0
    assert errors(tmp_path, 0).count("the draft was lost once") == 1
    assert "and replaced once" in errors(tmp_path, 0)


@pytest.mark.parametrize("loss", ["rank 1 is killed", "the cable is cut"])
def test_the_end_of_a_rank_ends_the_target_in_one_line_and_in_bounded_time(
    tmp_path: Path, small_pair: list[str], nodes: tuple[str, str], loss: str
) -> None:
    with running(tmp_path, small_pair, nodes) as (first, other):
        workers = [worker for node in (first, other) for worker in psutil.Process(node.pid).children(recursive=True)]
        began = time.monotonic()
        if loss == "the cable is cut":
            ip("-n", nodes[0], "link", "set", "cable", "down")
        else:
            psutil.Process(other.pid).children()[0].kill()
        while "amusd: rank 1 of the target is gone" not in errors(tmp_path, 0):
            assert time.monotonic() < began + CABLE_SECONDS, errors(tmp_path, 0)
            time.sleep(0.05)
        await_end(workers)
        assert first.wait(END_SECONDS) == 1


@pytest.mark.embedded
def test_a_draft_behind_a_cable_that_was_cut_is_found_again(tmp_path: Path, nodes: tuple[str, str]) -> None:
    write_keys(tmp_path / "keys")
    link = (f"tcp://{ADDRESSES[1]}:29501", f"transport.keys={tmp_path / 'keys'}")
    asked = (f"prompt={PROMPT}", "sampling.max_new_tokens=700", "sampling.ignore_eos=true")
    commands = (
        amusd_command("generate", *asked, f"drafter.address={link[0]}", link[1], "run_dir=out"),
        amusd_command("draft", f"listen={link[0]}", link[1]),
    )
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        target, draft = (
            stack.enter_context(subprocess.Popen(
                ["ip", "netns", "exec", node, *command],
                cwd=tmp_path, env=environment(), stdout=pipe, stderr=pipe, text=True,
            ))
            for node, command in zip(nodes, commands, strict=True)
        )  # fmt: skip
        stack.callback(draft.kill)
        stack.callback(target.kill)
        assert target.stdout is not None
        assert target.stderr is not None
        assert target.stdout.read(1)  # the answer has begun, and the draft works on it
        ip("-n", nodes[0], "link", "set", "cable", "down")
        assert any("the draft is replaced: it has said nothing for" in line for line in target.stderr)
        ip("-n", nodes[0], "link", "set", "cable", "up")
        _, lines = target.communicate(timeout=SECONDS)
    run(amusd_command("generate", *asked, "mode=autoregressive", "run_dir=plain"), tmp_path)
    together, plain = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("out", "plain"))
    assert together["token_ids"] == plain["token_ids"]
    assert together["metrics"]["num_draft_restarts"] == 1, lines
