"""`launch/two_nodes.sh` at two addresses, with keys: the answer of one machine, and nothing for others."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from amusd.transport.curve import write_keys
from tests.launch.processes import ROOT, SECONDS, environment
from tests.launch.small_pair import PROMPT, plain_answer, save_pair

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="127.0.0.2 is up on Linux"),
]

TARGET = "127.0.0.2"
NUM_TOKENS = 24
# in this mode the target waits for candidates: some are judged, whatever the timing
ASKED = [f"prompt={PROMPT}", f"sampling.max_new_tokens={NUM_TOKENS}", "output=json", "run_dir=out"]
ASKED += ["mode=synchronous", "num_speculative_tokens=3", "max_silence_seconds=60"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return save_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    write_keys(tmp_path / "keys")
    return tmp_path / "keys"


def part(keys: Path, folder: Path, *names: str) -> Path:
    """A folder with these of the keys."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in names:
        shutil.copy2(keys / name, folder / name)
    return folder


@contextmanager
def started(folder: Path, node: int, ports: list[str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    (own := folder / f"node {node}").mkdir()
    known = {"TARGET_HOST": TARGET, "NODE_RANK": str(node), "PYTHON": sys.executable}
    process = subprocess.Popen(
        ["sh", str(ROOT / "launch" / "two_nodes.sh"), *arguments],
        cwd=own,
        env={**environment(), **known, "STORE_PORT": ports[0], "LINK_PORT": ports[1]},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()  # and with it, by the kernel, what it has started
        process.communicate()


def run_both(folder: Path, of_target: list[str], of_draft: list[str]) -> tuple[tuple[int, str, str], ...]:
    """Start both nodes; return exit code, standard output and standard error of each."""
    with socket.create_server((TARGET, 0)) as one, socket.create_server((TARGET, 0)) as other:
        ports = [str(probe.getsockname()[1]) for probe in (one, other)]
    with started(folder, 0, ports, *of_target) as target, started(folder, 1, ports, *of_draft) as draft:
        ends = [(*process.communicate(timeout=SECONDS), process.returncode) for process in (target, draft)]
    return tuple((code, out, err) for out, err, code in ends)


@pytest.mark.parametrize("more", [[], ["target_tensor_parallel_size=2"]])
def test_two_nodes_that_have_their_parts_of_the_keys_give_the_answer_of_one(
    tmp_path: Path, pair: list[str], keys: Path, more: list[str]
) -> None:
    of_target = part(keys, tmp_path / "t", "target.key_secret", "draft.key", "store.key_secret")
    of_draft = part(keys, tmp_path / "d", "draft.key_secret", "target.key", "store.key_secret")
    arguments = [*pair, *ASKED, *more, f"transport.keys={of_target}"]
    (code, out, err), end_of_draft = run_both(tmp_path, arguments, [f"transport.keys={of_draft}"])
    assert (code, *end_of_draft[:2]) == (0, 0, ""), err
    for said in (err, end_of_draft[2]):
        assert said.count("amusd: waiting for ") == said.count("amusd: waited ") == 3
    assert end_of_draft[2].splitlines()[-1] == "amusd: the target has finished, and so has this draft"
    answer = json.loads(out)
    assert answer["metrics"]["num_draft_tokens"] > 0
    assert answer["metrics"]["num_tokens_alone"] == 0
    expected = plain_answer(pair, NUM_TOKENS)
    assert tuple(answer["token_ids"]) == expected
    assert len(set(expected)) > 5, "this answer is too simple to tell models apart"


WRONG = {
    "other keys": (
        ("target.key", "draft.key_secret", "store.key_secret"),
        "the value '.*' in the store was not written with this side's secret",
    ),
    "a key that is not on the list": (
        ("draft.key_secret",),
        r"no peer within 6 seconds: .* failed over their keys and none held; both ends need transport\.keys",
    ),
}
"""Which of the draft's files are of another folder of keys, and what both nodes say to that."""


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_key_ends_both_nodes_in_a_line_and_without_a_token(
    tmp_path: Path, pair: list[str], keys: Path, wrong: str
) -> None:
    names, reason = WRONG[wrong]
    write_keys(tmp_path / "other")
    mixed = part(keys, tmp_path / "mixed", *(path.name for path in keys.iterdir()))
    part(tmp_path / "other", mixed, *names)
    arguments = [*pair, *ASKED, f"transport.keys={keys}", "startup_timeout_seconds=6"]
    for code, out, err in run_both(tmp_path, arguments, [f"transport.keys={mixed}"]):
        said = [line for line in err.splitlines() if line.startswith("amusd: ")]
        (line,) = [one for one in said if not re.match("amusd: (run directory|waiting|still waiting|waited)", one)]
        assert re.search(reason, line)
        assert (code, out) == (2, "")
        assert "Traceback" not in err
