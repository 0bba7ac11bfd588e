"""`amusd draft` and its targets: exact whichever process is killed; a refusal is one line, at once."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from zmq.auth import load_certificate

from amusd.transport.curve import write_keys
from tests.launch.processes import (
    BLOCKS,
    SECONDS,
    amusd_command,
    assert_gone,
    begun,
    descendants,
    environment,
    free_port,
    run,
)
from tests.launch.small_pair import PROMPT, plain_answer
from tests.warm import Popen

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="process trees are read from /proc"),
]

NUM_TOKENS = 200


class Server:
    def __init__(self, folder: Path, pair: list[str]) -> None:
        self.folder, self.pair = folder, pair
        for name in ("keys", "other"):
            write_keys(folder / name)
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.errors = folder / "errors"
        listen = (f"listen={self.address}", f"transport.keys={folder / 'keys'}")
        with self.errors.open("w") as said:
            self.process = Popen(
                amusd_command("draft", *pair, *listen), cwd=folder, env=environment(), stderr=said, text=True
            )

    def await_line(self, line: str) -> None:
        deadline = time.monotonic() + SECONDS
        while line not in self.errors.read_text():
            assert self.process.poll() is None, self.errors.read_text()
            assert time.monotonic() < deadline, self.errors.read_text()
            time.sleep(0.02)

    def command(self, *arguments: str, keys: str = "keys") -> list[str]:
        named = (f"drafter.address={self.address}", f"transport.keys={self.folder / keys}")
        asked = (f"prompt={PROMPT}", f"sampling.max_new_tokens={NUM_TOKENS}", *BLOCKS, "output=json")
        return amusd_command("generate", *self.pair, *named, *asked, *arguments)

    def target(self, name: str) -> AbstractContextManager[subprocess.Popen[Any]]:
        return begun(self.command(f"run_dir={name}", "output=text"), self.folder)


@pytest.fixture
def server(tmp_path: Path, small_pair: list[str]) -> Iterator[Server]:
    server = Server(tmp_path, small_pair)
    server.await_line("draft: listens at tcp://127.0.0.1:")
    yield server
    server.process.kill()
    server.process.wait(SECONDS)


def test_a_draft_serves_target_after_target_whoever_is_killed_and_ends_with_a_signal(server: Server) -> None:
    expected = plain_answer(server.pair, NUM_TOKENS)
    with server.target("killed target") as killed:
        killed.kill()
        killed.communicate()
    with server.target("killed draft") as target:
        second = run(server.command("run_dir=second"), server.folder)
        descendants(server.process.pid)[-1].kill()
        target.communicate(timeout=SECONDS)
        assert target.returncode == 0
    result = json.loads((server.folder / "killed draft" / "result.json").read_text())
    assert tuple(result["token_ids"]) == expected
    assert result["metrics"]["num_draft_tokens"] > 0
    line = f"amusd: drafter.address={server.address}: the draft serves another target; it serves one at a time"
    assert (second.returncode, second.stdout, second.stderr.splitlines()[-1]) == (2, "", line)
    server.await_line(f"{server.address}: refused: a second peer\n")
    processes = descendants(server.process.pid)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(SECONDS) == 128 + signal.SIGTERM
    assert_gone([psutil.Process(one.pid) for one in processes if one.is_running()])
    assert "Traceback" not in server.errors.read_text()


@pytest.mark.parametrize(
    ("arguments", "keys", "line"),
    [
        ((), "other", "both ends need transport.keys, from one `amusd keys`, or neither"),
        (("drafter=ngram", "drafter.model=null"), "keys", "amusd: drafter=ngram: the draft has hf"),
        (
            ("target=embedded", "target.dtype=auto", "target.model=null"),
            "keys",
            "its tokenizer differs from the target's",
        ),
    ],
)
def test_a_target_that_cannot_work_with_the_draft_is_refused_in_a_line_and_the_next_is_served(
    server: Server, arguments: tuple[str, ...], keys: str, line: str
) -> None:
    done = run(server.command(*arguments, keys=keys), server.folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert line in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr + server.errors.read_text()
    served = run(server.command("run_dir=served"), server.folder)
    assert json.loads(served.stdout)["metrics"]["num_draft_tokens"] > 0


def test_a_stranger_without_a_hello_does_not_keep_the_draft_from_targets(server: Server) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        keys = server.folder / "keys"
        stranger.curve_publickey, stranger.curve_secretkey = load_certificate(keys / "target.key_secret")
        stranger.curve_serverkey, _ = load_certificate(keys / "draft.key")
        stranger.connect(server.address)
        stranger.send(b"?")
        server.await_line("refused: frame of 1 bytes")
        served = run(server.command(), server.folder)
        stranger.linger = 0
    assert json.loads(served.stdout)["metrics"]["num_draft_tokens"] > 0


def test_an_address_that_is_taken_is_named_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"listen=tcp://127.0.0.1:{taken.getsockname()[1]}"
        done = run(amusd_command("draft", "drafter=ngram", listen), tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot be used: Address already in use" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
