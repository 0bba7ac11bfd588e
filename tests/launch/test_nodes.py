"""Ranks of a target on two nodes: the tokens of one rank, and an end in bounded time whatever happens to them.

Three ranks of the target, two on the first node and one beside the draft on the second, in network namespaces.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from amusd.transport.curve import write_keys
from tests.launch.networks import Network, cabled_namespaces, cut, processes_in
from tests.launch.processes import ROOT, SECONDS, WAITING, amusd_command, environment, run
from tests.launch.small_pair import PROMPT, plain_answer, save_pair

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="namespaces are there on Linux"),
]
THREE = "target_tensor_parallel_size=3"
NUM_TOKENS = 24
END_SECONDS = 60.0
"""The longest that what is left may take to end once something has gone; documented as 30 s, on a machine at rest."""
PER_NODE = 2


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return save_pair(tmp_path_factory.mktemp("models"), num_heads=4)


@pytest.fixture
def network() -> Iterator[Network]:
    with cabled_namespaces() as made:
        yield made


class Nodes:
    """Starts on each of the two nodes what a user starts there, with a temporary folder of its own."""

    def __init__(self, network: Network, folder: Path, stack: ExitStack) -> None:
        self._network, self._folder, self._stack = network, folder, stack
        self._port, self._link_port = network.free_port(), network.free_port()

    def _start(self, node: int, name: str, command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
        folder = self._folder / name
        (folder / "tmp").mkdir(parents=True)
        with (folder / "err").open("w") as said:
            process = subprocess.Popen(
                self._network.on(node, command),
                cwd=folder,
                env=environment(TMPDIR=str(folder / "tmp"), TORCH_CPP_LOG_LEVEL="FATAL", **variables),
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )

        def end() -> None:
            process.kill()
            process.communicate()

        self._stack.callback(end)
        return process

    def _link(self) -> list[str]:
        return ["transport=zeromq", f"transport.address=tcp://{self._network.target_address}:{self._link_port}"]

    def torchrun(self, node: int, *arguments: str) -> subprocess.Popen[str]:
        """The line of docs/your_own_pair.md."""
        where = [f"--master-addr={self._network.target_address}", f"--master-port={self._port}"]
        flags = ["--nnodes=2", f"--node-rank={node}", f"--nproc-per-node={PER_NODE}", *where]
        program = [sys.executable, "-m", "torch.distributed.run", *flags, str(ROOT / "launch" / "run.py")]
        return self._start(node, f"node {node}", [*program, *arguments, *self._link()])

    def process(self, rank: int, *arguments: str) -> subprocess.Popen[str]:
        """One of the processes that torchrun would start."""
        variables = {"RANK": rank, "LOCAL_RANK": rank % PER_NODE, "WORLD_SIZE": 2 * PER_NODE}
        variables |= {"LOCAL_WORLD_SIZE": PER_NODE, "MASTER_PORT": self._port}
        program = [sys.executable, str(ROOT / "launch" / "run.py"), *arguments, *self._link()]
        address = {"MASTER_ADDR": self._network.target_address}
        texts = {name: str(value) for name, value in variables.items()}
        return self._start(rank // PER_NODE, f"rank {rank}", program, **texts, **address)

    def said(self, name: str) -> str:
        return (self._folder / name / "err").read_text()

    def left_over(self) -> list[Path]:
        """What is left in the temporary folders, besides torchrun's own."""
        return list(self._folder.glob("*/tmp/*amusd*"))


@pytest.fixture
def nodes(network: Network, tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(network, tmp_path, stack)


def keys_in(folder: Path) -> Path:
    write_keys(folder)
    return folder


def test_three_ranks_over_two_nodes_give_the_tokens_of_one_and_of_three_on_one_machine(
    network: Network, nodes: Nodes, tmp_path: Path, pair: list[str]
) -> None:
    keys = f"transport.keys={keys_in(tmp_path / 'keys')}"
    asked = [*pair, THREE, *WAITING, f"prompt={PROMPT}", "output=json", f"sampling.max_new_tokens={NUM_TOKENS}"]
    other = nodes.torchrun(1, keys)
    target = nodes.torchrun(0, *asked, "run_dir=out", keys)
    out, _ = target.communicate(timeout=SECONDS)
    other.communicate(timeout=SECONDS)
    assert (target.returncode, other.returncode) == (0, 0), nodes.said("node 0") + nodes.said("node 1")
    answer = json.loads(out)
    assert answer["metrics"]["num_draft_tokens"] > 0
    expected = plain_answer(pair, NUM_TOKENS)
    assert tuple(answer["token_ids"]) == expected
    assert len(set(expected)) > 5, "this answer is too simple to tell models apart"
    done = run(amusd_command("generate", *asked, "run_dir=out"), tmp_path)
    assert tuple(json.loads(done.stdout)["token_ids"]) == expected, done.stderr
    assert processes_in(network) == []
    assert nodes.left_over() == []


def test_doctor_prints_who_is_where_and_starts_nothing(
    network: Network, nodes: Nodes, tmp_path: Path, pair: list[str]
) -> None:
    keys = f"transport.keys={keys_in(tmp_path / 'keys')}"
    others = [nodes.process(rank, keys) for rank in (1, 2, 3)]
    target = nodes.process(0, "doctor", *pair, THREE, keys)
    out, _ = target.communicate(timeout=SECONDS)
    assert [other.wait(SECONDS) for other in others] == [0, 0, 0]
    assert target.returncode == 0, nodes.said("rank 0")
    first, second = "node 0 (10.77.0.1)", "node 1 (10.77.0.2)"
    assert out.splitlines()[:5] == [
        f"{first}: rank 0 of the target on cpu",
        f"{first}: rank 1 of the target on cpu",
        f"{second}: rank 2 of the target on cpu",
        f"{second}: the draft on cpu",
        "commands of rank 0: TCP, encrypted; passes: gloo or NCCL over 10.77.0.1, not encrypted",
    ]
    assert re.fullmatch(
        r"candidates and verdicts: transport=zeromq, tcp://10\.77\.0\.1:\d+, encrypted", out.splitlines()[5]
    )
    assert processes_in(network) == []
    assert nodes.left_over() == []


@pytest.mark.parametrize(
    ("wrong", "of_target", "of_other"),
    [
        (("store.key_secret",), "was not written with this side's secret", "was not written with this side's secret"),
        (("draft.key_secret",), "the two sides' transport.keys do not fit", "the two sides' transport.keys do not fit"),
        (None, r"no rank 2 of 0 to 3 came within 60 seconds", r"neither transport\.keys=FOLDER"),
    ],
    ids=["of the store", "of the link", "none"],
)
def test_a_wrong_key_or_none_ends_all_in_a_line_and_without_a_token(
    network: Network,
    nodes: Nodes,
    tmp_path: Path,
    pair: list[str],
    wrong: tuple[str, ...] | None,
    of_target: str,
    of_other: str,
) -> None:
    keys, other_keys = keys_in(tmp_path / "keys"), keys_in(tmp_path / "other")
    mixed = shutil.copytree(keys, tmp_path / "mixed")
    for name in wrong or ():
        shutil.copy2(other_keys / name, mixed / name)
    theirs = () if wrong is None else (f"transport.keys={mixed}",)
    others = [nodes.process(2, *theirs), nodes.process(3, *theirs), nodes.process(1, f"transport.keys={keys}")]
    asked = [*pair, THREE, f"prompt={PROMPT}", "run_dir=out", "startup_timeout_seconds=60"]
    target = nodes.process(0, *asked, f"transport.keys={keys}")
    out, _ = target.communicate(timeout=SECONDS)
    assert (target.returncode, out) == (2, "")
    assert re.search(of_target, nodes.said("rank 0"))
    for other in others:
        other.wait(SECONDS)
    assert others[0].returncode == 2
    assert re.search(of_other, nodes.said("rank 2"))
    assert "Traceback" not in "".join(nodes.said(f"rank {rank}") for rank in range(4))
    assert processes_in(network) == []
    assert nodes.left_over() == []


@pytest.mark.parametrize("loss", ["cable", "rank", "node", "target"])
def test_what_is_lost_ends_the_run_in_bounded_time_and_leaves_nothing(
    network: Network, nodes: Nodes, tmp_path: Path, pair: list[str], loss: str
) -> None:
    keys = f"transport.keys={keys_in(tmp_path / 'keys')}"
    others = [nodes.process(rank, keys) for rank in (1, 2, 3)]
    asked = [*pair, THREE, "max_model_len=4096", f"prompt={PROMPT}", "run_dir=out", "sampling.max_new_tokens=4000"]
    target = nodes.process(0, *asked, keys)
    assert target.stdout is not None
    assert target.stdout.read(1), nodes.said("rank 0")
    start = time.monotonic()
    if loss == "cable":
        cut(network)
    elif loss == "rank":
        os.kill(child_of(others[1].pid), signal.SIGKILL)
    elif loss == "node":
        for process in others[1:]:
            process.kill()
    else:
        target.kill()
    target.communicate(timeout=SECONDS)
    for other in others:
        other.wait(SECONDS)
    seconds = time.monotonic() - start
    said = {rank: nodes.said(f"rank {rank}") for rank in range(4)}
    assert seconds < END_SECONDS
    if loss != "target":
        assert target.returncode == 1
        assert re.search(r"amusd: .*(rank 2|a rank) of the target is gone|have lost each other", said[0])
    if loss in ("cable", "target"):
        assert "the target's machine is gone or out of reach, or its process was killed" in said[2]
        assert others[1].returncode == 1
    if loss == "rank":
        assert re.search(r"rank 2 of the target \(pid \d+\) was killed by signal 9", said[2])
    assert "Traceback" not in "".join(said.values())
    deadline = time.monotonic() + END_SECONDS
    while (left := processes_in(network)) and time.monotonic() < deadline:  # those whose parent was killed
        time.sleep(0.1)
    assert left == []


def child_of(pid: int) -> int:
    """The process of the rank that this one looks after, and `ip netns exec` has become."""
    done = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True, timeout=SECONDS)
    (child,) = done.stdout.split()
    return int(child)
