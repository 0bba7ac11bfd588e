"""`amusd serve` over table models, as a process of its own: the real server, engine, sessions and draft; no weights.

    python -m tests.serving.table_server port=0 max_queue=64

Arguments are those of `ServeConfig`, as JSON. It says its address in a line, and ends on SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0
END_SECONDS = 60.0
ROWS = 4
"""Answers at a time."""
MAX_TOKENS = 400
"""Of prompt and answer together."""


def main() -> None:
    from runtime import pair as pairs
    from table_model import TableModel

    from amusd.config import RunConfig, ServeConfig
    from amusd.drafters.autoregressive import AutoregressiveDrafter
    from amusd.serving.server import run_server
    from amusd.tracing.recorder import Recorder

    pairs.KeepingRecorder = Recorder  # as in `amusd serve`, which keeps no events

    settings: dict[str, Any] = {"port": 0}
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        settings[key] = json.loads(value)
    pass_seconds = settings.pop("pass_seconds", 0.0)

    def drafter() -> AutoregressiveDrafter:
        return AutoregressiveDrafter(TableModel(pairs.VOCAB_SIZE, seed=7, max_length=MAX_TOKENS))

    with pairs.pair({"autoregressive": drafter}, max_num_seqs=ROWS, pass_seconds=pass_seconds) as (engine, _):
        config = RunConfig(serve=ServeConfig(**settings))
        run_server(config, lambda _settings: engine, say)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@dataclass
class TableServer:
    """A running one. Figures of its process are read from /proc."""

    process: subprocess.Popen[str]
    url: str

    def end(self) -> tuple[int, str]:
        """Send SIGTERM; the exit code, and what it has said since it began to serve."""
        self.process.send_signal(signal.SIGTERM)
        said, _ = self.process.communicate(timeout=END_SECONDS)
        return self.process.returncode, said

    @property
    def num_descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    @property
    def num_threads(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/task").iterdir()))

    @property
    def megabytes(self) -> float:
        """Resident memory."""
        (kilobytes,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
        return int(kilobytes) / 1024

    def health(self) -> dict[str, Any]:
        response = httpx.get(f"{self.url}/health", timeout=END_SECONDS)
        return {"code": response.status_code, **response.json()}

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=END_SECONDS).text
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


@contextlib.contextmanager
def table_server(**settings: Any) -> Iterator[TableServer]:
    """Start one, and kill it if it has not been ended."""
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.serving.table_server", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        found = re.search(r"http://\S+", said)
        assert found is not None, said + process.stdout.read()
        yield TableServer(process, found[0])
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    main()
