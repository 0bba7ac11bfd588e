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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from serving.running import until

from amusd.config import RunConfig, ServeConfig
from amusd.errors import ConfigError
from amusd.serving.server import run_server
from tests.launch.processes import PATIENT, SECONDS, amusd_command, environment, run
from tests.test_documents import blocks
from tests.warm import ROOT, Popen

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="process trees are read from /proc")


KEY = "very-secret"


class Served:
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

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=SECONDS)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers={"Authorization": f"Bearer {KEY}"}, timeout=SECONDS)

    def figure(self, *names: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))

    def end(self, *signals: int) -> int:
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


def ask(client: OpenAI, model: str, number: int, **options: Any) -> str:
    fields = {
        "max_tokens": 200,
        "seed": number,
        "temperature": number % 2,
        "extra_body": {"ignore_eos": True},
        **options,
    }
    stream = client.completions.create(model=model, prompt=f"Story {number}: once", stream=True, **fields)
    return "".join(chunk.choices[0].text for chunk in stream)


@contextmanager
def reading(own: Served, numbers: Sequence[int], **options: Any) -> Iterator[list[Future[str]]]:
    with own.client() as client, ThreadPoolExecutor(len(numbers)) as threads:
        yield [threads.submit(ask, client, own.model, number, **options) for number in numbers]


def test_a_killed_draft_costs_no_token_and_a_signal_waits_for_answers(tmp_path: Path, small_pair: list[str]) -> None:
    settings = ("serve.model_name=embedded", f"serve.shutdown_seconds={SECONDS}", "max_num_seqs=2", PATIENT)
    with served(tmp_path, *small_pair, *settings, AMUSD_API_KEY=KEY) as own:
        assert own.model == "embedded"
        assert httpx.get(f"{own.url}/v1/models", timeout=SECONDS).status_code == 401
        draft = json.loads((own.folder / "workers.json").read_text())["draft"][0]
        with reading(own, range(4)) as answers:
            until(lambda: own.figure("vllm:generation_tokens_total") > 8)
            os.kill(draft, signal.SIGKILL)
        until(lambda: own.get("/health").json()["num_draft_restarts"] == 1)
        assert (own.figure("amusd:draft_restarts_total"), own.figure("amusd:draft_present")) == (1, 1)

        shown = blocks(ROOT / "docs" / "serving.md", "py")[0].replace("stream=True", "stream=True, max_tokens=8")
        shown = shown.replace("http://127.0.0.1:8000", own.url).replace('api_key="none"', f'api_key="{KEY}"')
        done = run([sys.executable, "-c", shown], tmp_path)
        assert (done.returncode, bool(done.stdout)) == (0, True), done.stderr

        states = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:request_success_total")
        before = own.figure(*states)
        with reading(own, range(4), extra_body={"ignore_eos": True, "mode": "autoregressive"}) as alone:
            until(lambda: own.figure(*states) == before + 4)  # all are there
            own.process.send_signal(signal.SIGTERM)
        assert [answer.result() for answer in answers] == [answer.result() for answer in alone]
        assert own.end() == 0
        assert "ending: no new requests" in own.errors
        assert "cut off" not in own.errors
        files = [path.read_text(encoding="utf-8") for path in own.folder.rglob("*") if path.is_file()]
        assert len(files) >= 3
        assert not any(KEY in text or "Story" in text for text in [*files, own.errors])
    shutil.copy(own.folder / "config.yaml", tmp_path / "again.yaml")
    copied = run(amusd_command("serve", "--config-dir=.", "--config-name=again", "run_dir=again"), tmp_path)
    assert (copied.returncode, copied.stdout) == (2, "")
    assert "serve.api_key=(hidden): a run does not keep its key" in copied.stderr


def test_a_second_signal_ends_it_at_once(tmp_path: Path, small_pair: list[str]) -> None:
    with served(tmp_path, *small_pair, "max_num_seqs=1") as own:
        body = {"model": own.model, "prompt": "a", "max_tokens": 240, "n": 60, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{own.url}/v1/completions", json=body, timeout=SECONDS) as answer:
            pieces = answer.iter_raw()  # which ends the request when nobody refers to it
            next(pieces)
            own.process.send_signal(signal.SIGTERM)
            until(lambda: "ending: no new requests" in own.errors or own.process.poll() is not None)
            assert own.end(signal.SIGTERM) == 128 + signal.SIGTERM


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "big.example"])
def test_a_server_without_a_key_is_not_opened_to_other_machines(host: str) -> None:
    with pytest.raises(ConfigError, match=f"^serve.host={host}: .*; set AMUSD_API_KEY or serve.api_key$"):
        run_server(RunConfig(serve=ServeConfig(host=host, port=0)), pytest.fail)


def test_an_address_that_cannot_be_had_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(amusd_command("serve", f"serve.port={port}", "target=hf", "target.model=/nowhere"), tmp_path)
    assert done.returncode == 2
    message = f"amusd: serve.host=127.0.0.1 serve.port={port}: cannot listen there (Address already in use)"
    assert message in done.stderr
