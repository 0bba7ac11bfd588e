"""`launch/two_nodes.sh` on two nodes, with keys: the answer of one machine, and nothing for others."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from amusd.transport.curve import write_keys
from tests.launch.networks import Network, cabled_namespaces, loopback, processes_in
from tests.launch.processes import ROOT, SECONDS, environment, node_variables
from tests.launch.small_pair import PROMPT, plain_answer, save_pair

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="127.0.0.2 is up and namespaces are there on Linux"
    ),
]

NUM_TOKENS = 24
PATIENCE = "startup_timeout_seconds=6"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return save_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    with ExitStack() as stack:
        yield loopback() if request.param == "loopback" else stack.enter_context(cabled_namespaces())


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    write_keys(tmp_path / "keys")
    return tmp_path / "keys"


@dataclass(frozen=True)
class End:
    """What a node said, all of it, and how it ended."""

    code: int
    out: str
    err: str


class TwoNodes:
    """Starts what a user starts on each of them."""

    def __init__(self, network: Network, folder: Path, pair: Sequence[str]) -> None:
        self._network, self._folder, self._pair = network, folder, pair
        self._store_port, self._link_port = network.free_port(), network.free_port()

    @contextmanager
    def target(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        asked = [f"prompt={PROMPT}", f"sampling.max_new_tokens={NUM_TOKENS}", "output=json", "run_dir=out"]
        # in this mode the target waits for candidates: some are judged, whatever the timing
        asked += ["mode=synchronous", "num_speculative_tokens=3", "max_silence_seconds=60"]
        with self._script(0, *self._pair, *asked, *arguments) as process:
            yield process

    def draft(self, *arguments: str) -> End:
        with self._script(1, *arguments) as process:
            return end_of(process)

    def plain_peer(self, *arguments: str) -> End:
        program = ROOT / "tests" / "launch" / "plain_peer.py"
        variables = node_variables(1, self._network.target_address, self._store_port)
        with self._started(1, [sys.executable, str(program), *arguments], variables) as process:
            return end_of(process)

    def _script(self, node: int, *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
        variables = {
            "TARGET_HOST": self._network.target_address,
            "NODE_RANK": str(node),
            "STORE_PORT": str(self._store_port),
            "LINK_PORT": str(self._link_port),
            "PYTHON": sys.executable,
        }
        return self._started(node, ["sh", str(ROOT / "launch" / "two_nodes.sh"), *arguments], variables)

    @contextmanager
    def _started(self, node: int, command: Sequence[str], variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
        folder = self._folder / f"node {node}"
        folder.mkdir(exist_ok=True)
        process = subprocess.Popen(
            self._network.on(node, command),
            cwd=folder,
            env={**environment(), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()  # and with it, by the kernel, what it has started
            process.communicate()


def end_of(process: subprocess.Popen[str]) -> End:
    out, err = process.communicate(timeout=SECONDS)
    return End(process.returncode, out, err)


def part(keys: Path, folder: Path, *names: str) -> Path:
    """A folder with these of the keys."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in names:
        shutil.copy2(keys / name, folder / name)
    return folder


@pytest.mark.parametrize("network", ["loopback", "namespaces"], indirect=True)
def test_two_nodes_that_have_their_parts_of_the_keys_give_the_answer_of_one(
    network: Network, tmp_path: Path, pair: list[str], keys: Path
) -> None:
    of_target = part(keys, tmp_path / "t", "target.key_secret", "draft.key", "store.key_secret")
    of_draft = part(keys, tmp_path / "d", "draft.key_secret", "target.key", "store.key_secret")
    nodes = TwoNodes(network, tmp_path, pair)
    with nodes.target(f"transport.keys={of_target}") as target:
        draft = nodes.draft(f"transport.keys={of_draft}")
        end = end_of(target)
    assert (end.code, draft.code, draft.out) == (0, 0, ""), end.err
    assert waits(end) == ["the draft's machine (NODE_RANK=1)", "the draft's process on its machine", "both models"]
    assert waits(draft) == ["the target's machine (NODE_RANK=0)", "the target's job", "both models"]
    assert draft.err.splitlines()[-1] == "amusd: the target has finished, and so has this draft"
    answer = json.loads(end.out)
    assert answer["metrics"]["num_draft_tokens"] > 0
    assert answer["metrics"]["num_tokens_alone"] == 0
    expected = plain_answer(pair, NUM_TOKENS)
    assert tuple(answer["token_ids"]) == expected
    assert len(set(expected)) > 5, "this answer is too simple to tell models apart"
    assert processes_in(network) == []


@pytest.mark.parametrize("network", ["loopback"], indirect=True)
def test_the_targets_node_starts_its_other_ranks(network: Network, tmp_path: Path, pair: list[str], keys: Path) -> None:
    nodes = TwoNodes(network, tmp_path, pair)
    with nodes.target(f"transport.keys={keys}", "target_tensor_parallel_size=2") as target:
        draft = nodes.draft(f"transport.keys={keys}")
        end = end_of(target)
    assert (end.code, draft.code, draft.out) == (0, 0, ""), end.err
    answer = json.loads(end.out)
    assert answer["metrics"]["num_tokens_alone"] == 0
    assert tuple(answer["token_ids"]) == plain_answer(pair, NUM_TOKENS)
    workers = json.loads((tmp_path / "node 0" / "out" / "workers.json").read_text())
    assert len({*workers["target"], *workers["draft"]}) == 3


NOT_OURS = "the value '.*' in the store was not written with this side's secret"
NO_PEER = r"no peer within 6 seconds: .* failed over their keys and none held; both ends need transport\.keys"
WRONG = {
    "other keys": (("target.key", "draft.key_secret", "store.key_secret"), NOT_OURS),
    "other keys of the link": (("target.key", "draft.key_secret"), NO_PEER),
    "a key that is not on the list": (("draft.key_secret",), NO_PEER),
}
"""Which of the draft's files are of another folder of keys, and what both nodes say to that."""


@pytest.mark.parametrize("network", ["namespaces"], indirect=True)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_key_ends_both_nodes_in_a_line_and_without_a_token(
    network: Network, tmp_path: Path, pair: list[str], keys: Path, wrong: str
) -> None:
    names, reason = WRONG[wrong]
    write_keys(tmp_path / "other")
    mixed = part(keys, tmp_path / "mixed", *(path.name for path in keys.iterdir()))
    part(tmp_path / "other", mixed, *names)
    nodes = TwoNodes(network, tmp_path, pair)
    with nodes.target(f"transport.keys={keys}", PATIENCE) as target:
        draft = nodes.draft(f"transport.keys={mixed}")
        end = end_of(target)
    assert_refused(end, reason)
    assert_refused(draft, reason)
    assert processes_in(network) == []


@pytest.mark.parametrize("network", ["namespaces"], indirect=True)
@pytest.mark.parametrize(
    ("arguments", "of_draft", "of_target"),
    [
        ((), "not on this machine, and neither transport.keys=FOLDER", "nobody else came within 60 seconds"),
        (("transport.insecure=true",), NOT_OURS, NOT_OURS),
    ],
    ids=["nothing said", "insecure"],
)
def test_a_draft_without_a_key_ends_both_nodes_in_a_line_and_without_a_token(
    network: Network,
    tmp_path: Path,
    pair: list[str],
    keys: Path,
    arguments: tuple[str, ...],
    of_draft: str,
    of_target: str,
) -> None:
    nodes = TwoNodes(network, tmp_path, pair)
    with nodes.target(f"transport.keys={keys}", PATIENCE) as target:
        draft = nodes.draft(*arguments)
        end = end_of(target)
    assert_refused(draft, of_draft)
    assert_refused(end, of_target)
    assert processes_in(network) == []


@pytest.mark.parametrize("network", ["namespaces"], indirect=True)
def test_a_plain_peer_is_not_spoken_to_even_if_it_knows_where_and_when(
    network: Network, tmp_path: Path, pair: list[str], keys: Path
) -> None:
    nodes = TwoNodes(network, tmp_path, pair)
    with nodes.target(f"transport.keys={keys}", PATIENCE) as target:
        peer = nodes.plain_peer(str(part(keys, tmp_path / "stolen", "store.key_secret")), "6")
        end = end_of(target)
    assert peer.code != 0
    assert re.search(NO_PEER, peer.err)
    assert_refused(end, NO_PEER)
    assert processes_in(network) == []


def waits(end: End) -> list[str]:
    """What a node said it waited for, and had in the end."""
    begun = re.findall(r"^amusd: waiting for (.+?)(?: at \S+| to load .*)?(?:: \d+ s at most)?$", end.err, re.MULTILINE)
    done = re.findall(r"^amusd: waited \d+ s for (.+?)(?: at \S+| to load .*)?: done$", end.err, re.MULTILINE)
    assert begun == done
    return begun


def assert_refused(end: End, reason: str) -> None:
    """It says why in a line, ends as after a user's mistake, and has told nobody a token."""
    said = [line for line in end.err.splitlines() if line.startswith("amusd: ")]
    lines = [line for line in said if not re.match("amusd: (run directory|waiting|still waiting|waited)", line)]
    assert len(lines) == 1, end.err
    assert re.search(reason, lines[0])
    assert (end.code, end.out) == (2, "")
    assert "Traceback" not in end.err
