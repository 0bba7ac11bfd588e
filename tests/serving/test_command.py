"""`amusd serve` as a user runs it: real processes, signals, a draft that is killed, keys and addresses."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from serving.test_leaving import raw_request, until

from amusd.commands.run import serve
from amusd.config import RunConfig
from amusd.console import Console
from amusd.errors import MissingDependencyError
from launch.process_tree import descendants
from tests.launch.processes import SECONDS, amusd_command, environment, run
from tests.launch.small_pair import save_pair
from tests.test_documents import blocks
from tests.warm import ROOT, Popen

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="process trees are read from /proc")


DOCUMENTED = blocks(ROOT / "docs" / "serving.md", "py")[0].replace("stream=True", "stream=True, max_tokens=8")
"""What the guide shows, with a short answer."""


class Served:
    """`amusd serve` that answers."""

    def __init__(self, folder: Path, *overrides: str, **variables: str) -> None:
        self.folder = folder / "out"
        self._errors = (folder / "stderr").open("w+")
        self.process = Popen(
            amusd_command("serve", "run_dir=out", "serve.port=0", *overrides),
            cwd=folder,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=self._errors,
            start_new_session=True,
        )
        until(lambda: "serving " in self.errors or self.process.poll() is not None, SECONDS)
        found = re.search(r"serving (\S+) at (http://127\.0\.0\.1:\d+)$", self.errors, re.MULTILINE)
        assert found, self.errors
        self.model, self.url = found[1], found[2]

    @property
    def errors(self) -> str:
        return Path(self._errors.name).read_text(encoding="utf-8")

    @property
    def draft(self) -> int:
        return int(json.loads((self.folder / "workers.json").read_text())["draft"][0])

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=SECONDS)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=SECONDS)

    def figure(self, *names: str) -> float:
        begins = tuple(f"{name}{end}" for name in names for end in "{ ")
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(begins))

    def end(self, *signals: int) -> int:
        """Send signals; return the exit code."""
        for number in signals:
            self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=SECONDS)
        self._errors.close()
        assert out == b""
        return int(self.process.returncode)


@contextmanager
def served(folder: Path, *overrides: str, **variables: str) -> Iterator[Served]:
    own = Served(folder, *overrides, **variables)
    try:
        yield own
    finally:
        if own.process.poll() is None:
            own.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A pair of tiny models."""
    return save_pair(tmp_path_factory.mktemp("pair"))


def ask(client: OpenAI, model: str, number: int, **options: Any) -> str:
    """A sampled answer; `number` tells it from the others."""
    fields = {"max_tokens": 32, "seed": number, "temperature": number % 2, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(
        model=model, prompt=f"Story {number}: once", stream=True, **{**fields, **options}
    )
    return "".join(chunk.choices[0].text for chunk in stream)


class Readers:
    """Several streams at once."""

    def __init__(self, own: Served, numbers: Sequence[int], **options: Any) -> None:
        self.texts: dict[int, str] = {}

        def read(number: int) -> None:
            with own.client() as client:
                self.texts[number] = ask(client, own.model, number, **options)

        self._threads = [threading.Thread(target=read, args=(number,)) for number in numbers]
        for thread in self._threads:
            thread.start()

    def join(self) -> dict[int, str]:
        for thread in self._threads:
            thread.join(SECONDS)
        return self.texts


@pytest.mark.embedded
def test_a_draft_that_is_killed_under_eight_streams_costs_no_token_and_is_told(tmp_path: Path) -> None:
    with served(tmp_path) as own:
        assert own.model == "embedded"
        assert own.get("/health").json()["draft"] == "present"
        readers = Readers(own, range(8))
        until(lambda: own.figure("vllm:generation_tokens_total") > 24, SECONDS)
        os.kill(own.draft, signal.SIGKILL)
        texts = readers.join()
        with own.client() as client:
            plain = {
                number: ask(client, own.model, number, extra_body={"ignore_eos": True, "mode": "autoregressive"})
                for number in range(8)
            }
        assert texts == plain
        health = own.get("/health")
        assert (health.status_code, health.json()["num_draft_restarts"]) == (200, 1)
        assert (own.figure("amusd:draft_restarts_total"), own.figure("amusd:draft_present")) == (1, 1)
        code = DOCUMENTED.replace("http://127.0.0.1:8000", own.url)
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
        assert (shown.returncode, bool(shown.stdout)) == (0, True), shown.stderr
        assert own.end(signal.SIGTERM) == 0
        assert "Story" not in own.errors


def test_a_signal_ends_the_server_when_its_answers_are_made(tmp_path: Path, small: list[str]) -> None:
    with served(tmp_path, *small, "max_num_seqs=1", "serve.shutdown_seconds=240") as own:
        body = {"model": own.model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
        held = raw_request(own, body, length=20)  # one that is being sent, so that the server does not end meanwhile
        readers = Readers(own, range(16), max_tokens=200)
        states = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:request_success_total")
        until(lambda: own.figure(*states) == 16, SECONDS)  # all are there
        own.process.send_signal(signal.SIGTERM)
        until(lambda: "ending: no new requests" in own.errors or own.process.poll() is not None, SECONDS)
        refused = httpx.post(f"{own.url}/v1/completions", json={"model": own.model, "prompt": "a"}, timeout=SECONDS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        texts = readers.join()
        assert own.process.poll() is None
        held.sendall(json.dumps(body).encode()[20:])
        assert held.recv(100).startswith(b"HTTP/1.1 200 OK")
        held.close()
        assert own.end() == 0
        assert sorted(texts) == [*range(16)]
        assert {len(text.encode()) for text in texts.values()} != {0}
        assert "ending: no new requests" in own.errors
        assert "cut off" not in own.errors
    again = Path(tmp_path / "again")
    again.mkdir()
    with served(again, *small) as own, own.client() as client:
        mode = {"ignore_eos": True, "mode": "autoregressive"}
        number = 13  # of those that waited
        assert ask(client, own.model, number, max_tokens=200, extra_body=mode) == texts[number]
        assert own.end(signal.SIGINT) == 0  # Ctrl-C, with nothing to wait for


def test_a_second_signal_ends_it_at_once(tmp_path: Path, small: list[str]) -> None:
    with served(tmp_path, *small, "max_num_seqs=1") as own:
        body = {"model": own.model, "prompt": "a", "max_tokens": 240, "n": 60, "ignore_eos": True}
        with httpx.stream(
            "POST", f"{own.url}/v1/completions", json={**body, "stream": True}, timeout=SECONDS
        ) as answer:
            pieces = answer.iter_raw()  # which ends the request when nobody refers to it
            next(pieces)
            own.process.send_signal(signal.SIGTERM)
            until(lambda: "ending: no new requests" in own.errors or own.process.poll() is not None, SECONDS)
            assert own.end(signal.SIGTERM) == 128 + signal.SIGTERM


@pytest.mark.parametrize("loaded", ["launch/run.py", "libtorch_cpu.so"], ids=["python", "torch"])
def test_a_signal_while_it_starts_is_told_in_one_line(tmp_path: Path, small: list[str], loaded: str) -> None:
    with (tmp_path / "stderr").open("w+") as errors:
        command = amusd_command("serve", "run_dir=out", "serve.port=0", *small)
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=errors)

        def has_come_so_far() -> bool:
            folders = [Path(f"/proc/{pid}") for pid in descendants(process.pid)]
            return any(loaded in (folder / name).read_text() for folder in folders for name in ("cmdline", "maps"))

        until(has_come_so_far, SECONDS)
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=SECONDS)[0] == b""
    lines = (tmp_path / "stderr").read_text().splitlines()
    assert (process.returncode, lines) == (143, [f"amusd: run directory: {tmp_path / 'out'}", "amusd: interrupted"])


def test_a_key_is_kept_out_of_files_and_may_come_from_the_environment(tmp_path: Path, small: list[str]) -> None:
    with served(tmp_path, *small, "serve.model_name=mine", AMUSD_API_KEY="very-secret") as own:
        assert own.model == "mine"
        assert own.get("/v1/models").status_code == 401
        with own.client("very-secret") as client:
            assert [card.id for card in client.models.list()] == ["mine"]
        os.kill(own.draft, signal.SIGKILL)
        until(lambda: own.get("/health").json()["num_draft_restarts"] == 1, SECONDS)  # though nobody asks for a token
        files = [path.read_text(encoding="utf-8") for path in own.folder.rglob("*") if path.is_file()]
        assert len(files) >= 3
        assert not any("very-secret" in text for text in [*files, own.errors])
        assert own.end(signal.SIGTERM) == 0
    shutil.copy(own.folder / "config.yaml", tmp_path / "again.yaml")
    copied = run(amusd_command("serve", "--config-dir=.", "--config-name=again", "run_dir=again"), tmp_path)
    assert (copied.returncode, copied.stdout) == (2, "")
    assert "serve.api_key=(hidden): a run does not keep its key" in copied.stderr


def test_an_address_that_cannot_be_had_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(amusd_command("serve", f"serve.port={port}", "target=hf", "target.model=/nowhere"), tmp_path)
    assert done.returncode == 2
    assert f"amusd: serve.port={port}: cannot be used at 127.0.0.1 (Address already in use)" in done.stderr
    done = run(amusd_command("serve", "serve.port=0", "serve.host=no.such.host.invalid"), tmp_path)
    assert done.returncode == 2
    assert "amusd: serve.host=no.such.host.invalid: " in done.stderr


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("amusd.serving.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingDependencyError, match=r"^serve: needs uvicorn, .* pip install 'amusd\[serve\]'$"):
        serve(RunConfig(), lambda _: pytest.fail("nothing is loaded"), Console())
