"""Requests to several engines under Ray Serve, while one is killed and replaced, and while all are restarted in turn.

Every answer is compared with that of one `amusd serve` to the same request. Ray is started here, with all of its
processes, and ended. Overrides come last: python experiments/many_engines/run.py --users 8 -- max_num_seqs=4
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

import asyncio
import json
import os
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amusd.config import RunConfig
from amusd.console import table
from amusd.errors import ConfigError
from experiments.common import Document, run, write_results
from experiments.request import ROOT, Request, parser_of, request_of
from experiments.serving.client import data_fields
from experiments.serving.run import serving

if TYPE_CHECKING:
    import httpx

SECONDS = 300.0
"""How long a request, a replica's start and the end of Ray may take."""
LOOK_SECONDS = 0.2
NUM_ENGINES = 2
PATH = "/v1/chat/completions"
COLUMNS = ("requests", "answered", "right", "retried", "cut_off", "refused", "wrong", "moves")


def main() -> None:
    """One engine, then several: quietly, with a kill, with a restart."""
    parser = parser_of("many_engines", __doc__, num_prompts=50, num_tokens=8)
    parser.add_argument("--requests", type=int, default=200, help="of them a quarter in quiet (default: %(default)s)")
    parser.add_argument("--users", type=int, default=8, help="requests at a time (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for both")
    arguments = parser.parse_args()
    request = request_of(arguments)
    request.runs.mkdir(parents=True, exist_ok=True)
    bodies = bodies_of(request, 24 if request.quick else arguments.requests)
    with serving(arguments.overrides, request.runs) as endpoint:
        expected = asyncio.run(ask_all(endpoint.url, bodies, arguments.users, nothing))
    from launch.compose import compose_config
    from launch.environment import describe_environment

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = compose_config([*arguments.overrides, f"ray.min_replicas={NUM_ENGINES}", f"serve.port={port}"])
    with ray_cluster(config):
        engines = Engines(config)
        engines.deploy()
        parts = {}
        for name, disturb in (("quiet", nothing), ("kill", engines.kill_one), ("restart", engines.deploy)):
            number = len(bodies) // 4 if name == "quiet" else len(bodies)
            began = time.monotonic()
            seen = asyncio.run(ask_all(engines.url, bodies[:number], arguments.users, disturb))
            parts[name] = {**counts_of(seen, expected[:number]), "seconds": time.monotonic() - began}
            print(f"{name}: {parts[name]}", file=sys.stderr, flush=True)
    left = left_over()
    rows = [(name, *(str(part[column]) for column in COLUMNS)) for name, part in parts.items()]
    print(table(("", *COLUMNS), rows))
    print(f"processes left: {len(left)}")
    measured = {"parts": parts, "left": len(left), "users": arguments.users, "engines": NUM_ENGINES}
    write_results(request, describe_environment(), measured)
    if problems := problems_of(parts, left):
        print(*problems, sep="\n", file=sys.stderr)
        sys.exit(1)


# Requests


def bodies_of(request: Request, number: int) -> list[Document]:
    """Turns of as many conversations as there are prompts, half of them streamed, half of them sampled."""
    firsts = [json.loads(line) for line in request.lines()]
    bodies = []
    for index in range(number):
        turn, conversation = divmod(index, len(firsts))
        first = firsts[conversation]
        messages = [{"role": "user", "content": first.get("prompt") or first["turns"][0]}]
        for past in range(turn):
            messages += [
                {"role": "assistant", "content": f"Answer {past}."},
                {"role": "user", "content": f"Tell me more about point {past + 1}."},
            ]
        fields = {"temperature": 0.7 * (index % 2), "seed": index, "stream": index // 2 % 2 == 0}
        bodies.append({"messages": messages, "max_tokens": request.num_tokens, "ignore_eos": True, **fields})
    return bodies


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the client of one request saw."""

    conversation: str
    text: str
    status: int
    error: str | None
    """The code of an error; None for a whole answer."""
    engine: str | None
    num_lost: int
    """Engines that were lost with this request before one began its answer."""


async def ask_all(url: str, bodies: Sequence[Document], users: int, disturb: Callable[[], None]) -> list[Seen]:
    """Send all, `users` at a time; what was seen, in order.

    When a third is answered, `disturb` is called in a thread; the last third is sent when it has returned.
    """
    import httpx

    seen: dict[int, Seen] = {}
    third = len(bodies) // 3
    is_disturbed = asyncio.Event()
    left = iter(range(len(bodies)))
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def user() -> None:
            for index in left:
                if index >= 2 * third:
                    await is_disturbed.wait()
                seen[index] = await ask(client, {**bodies[index], "model": model})
                if len(seen) == third:
                    await asyncio.to_thread(disturb)
                    is_disturbed.set()

        await asyncio.gather(*(user() for _ in range(users)))
    return [seen[index] for index in range(len(bodies))]


async def ask(client: httpx.AsyncClient, body: Document) -> Seen:
    """Send one request, and read its answer to the end."""
    texts: list[str] = []
    error = None
    async with client.stream("POST", PATH, json=body) as response:
        if "text/event-stream" in response.headers["content-type"]:
            documents = [json.loads(data) async for data in data_fields(response.aiter_bytes()) if data != b"[DONE]"]
        else:
            await response.aread()
            documents = [response.json()] if "json" in response.headers["content-type"] else [{"error": {"code": "?"}}]
    for document in documents:
        error = document["error"]["code"] if document.get("error") else error
        choices = document.get("choices") or ()
        texts += [(choice.get("message") or choice.get("delta") or {}).get("content") or "" for choice in choices]
    return Seen(
        conversation=body["messages"][0]["content"],
        text="".join(texts),
        status=response.status_code,
        error=error,
        engine=response.headers.get("x-amusd-engine"),
        num_lost=int(response.headers.get("x-amusd-lost", 0)),
    )


def counts_of(seen: Sequence[Seen], expected: Sequence[Seen]) -> dict[str, Any]:
    """How the requests of one part ended."""
    pairs = [(one, other) for one, other in zip(seen, expected, strict=True) if one.error is None]
    last: dict[str, str | None] = {}
    moves = 0
    for one in seen:
        moves += last.get(one.conversation, one.engine) != one.engine
        last[one.conversation] = one.engine
    cut_off = [(one, other) for one, other in zip(seen, expected, strict=True) if one.error and one.status < 400]
    right = sum(one.text == other.text for one, other in pairs)
    return {
        "requests": len(seen),
        "answered": len(pairs),
        "right": right,
        "retried": sum(one.num_lost > 0 for one in seen),
        "cut_off": len(cut_off),
        "refused": sum(one.status >= 400 for one in seen),
        "wrong": len(pairs) - right + sum(not other.text.startswith(one.text) for one, other in cut_off),
        "moves": moves,
        "errors": dict(Counter(f"{one.status} {one.error}" for one in seen if one.error)),
        "by_engine": list(Counter(one.engine for one in seen).values()),
    }


def problems_of(parts: Document, left: Sequence[int]) -> list[str]:
    """What must not be."""
    problems = [f"{len(left)} processes were left"] if left else []
    for name, part in parts.items():
        problems += [f"{name}: {part[what]} {what}" for what in ("wrong", "refused") if part[what]]
        if name != "kill" and part["cut_off"]:
            problems.append(f"{name}: {part['cut_off']} cut off")
    return problems


# Ray


@contextmanager
def ray_cluster(config: RunConfig) -> Iterator[None]:
    """A small Ray of this process's own, with room for the engines. Raises `ConfigError`."""
    try:
        import ray
        from ray import serve
    except ModuleNotFoundError:
        raise ConfigError("ray: is not installed; pip install 'amusd[ray]'") from None
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    folder = tempfile.mkdtemp(prefix="ray-")
    cores = NUM_ENGINES * config.engine().num_ranks * config.ray.num_cpus
    limits = {"num_cpus": cores, "num_gpus": 0, "object_store_memory": 100_000_000, "include_dashboard": False}
    ray.init(address="local", log_to_driver=False, _temp_dir=folder, **limits)
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def nothing() -> None:
    """Disturb nobody."""


class Engines:
    """The deployed engines, and what is done to them."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.url = f"http://127.0.0.1:{config.serve.port}"

    def deploy(self) -> None:
        """Start all, or restart them one after another."""
        from launch.ray_serve import deploy

        deploy(self._config)

    def kill_one(self) -> None:
        """Send one of them SIGKILL, and wait until all run again. Raises `ConfigError`."""
        import httpx

        engine = httpx.get(f"{self.url}/health", timeout=SECONDS).headers["x-amusd-engine"]
        os.kill(int(engine.rpartition("-")[2]), signal.SIGKILL)
        for all_run in (False, True):  # it is noticed, it is replaced
            deadline = time.monotonic() + SECONDS
            while (self._states() == {"RUNNING": NUM_ENGINES}) != all_run:
                if time.monotonic() > deadline:
                    raise ConfigError(f"ray: the killed engine was not replaced within {SECONDS:g} s")
                time.sleep(LOOK_SECONDS)

    @staticmethod
    def _states() -> dict[str, int]:
        from ray import serve

        states: dict[str, int] = serve.status().applications["amusd"].deployments["engines"].replica_states
        return states


def left_over() -> list[int]:
    """Processes that this one has started and that are still there, some seconds later."""
    from launch.process_tree import descendants, state_of

    deadline = time.monotonic() + 20.0
    while (found := [pid for pid in descendants(os.getpid()) if state_of(pid) != "Z"]) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    return found


if __name__ == "__main__":
    run(main)
