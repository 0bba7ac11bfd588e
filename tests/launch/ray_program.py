"""Runs two engines under Ray Serve, kills one, and writes the answers before and after to a JSON file.

A program, so that it may run in a network of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import httpx
import ray
from amusd_launch.ray_serve import build
from ray import serve

DEADLINE = 240.0
URL = "http://127.0.0.1:8123"


def answers() -> list[str]:
    found, deadline = [], time.monotonic() + DEADLINE
    for number in range(4):
        body = {"model": "target", "prompt": f"{number} and", "max_tokens": 8, "ignore_eos": True, "seed": 1}
        while True:
            response = httpx.post(f"{URL}/v1/completions", json=body, timeout=DEADLINE)
            if response.status_code == 200:
                found.append(response.json()["choices"][0]["text"])
                break
            if time.monotonic() > deadline:
                raise TimeoutError(response.text)
            time.sleep(0.2)
    return found


def kill_one() -> None:
    replicas = serve.status().applications["amusd"].deployments["engines"].replica_states
    assert replicas.get("RUNNING") == 2, replicas
    pids = [actor.pid for actor in ray_actors()]
    os.kill(pids[0], signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE
    while len(now := [actor.pid for actor in ray_actors()]) < 2 or pids[0] in now:
        if time.monotonic() > deadline:
            raise TimeoutError("no replica took the place of the killed one")
        time.sleep(0.5)


def ray_actors() -> list[object]:
    from ray.util.state import list_actors

    found = list_actors(filters=[("state", "=", "ALIVE")], detail=True)
    return [actor for actor in found if "engines" in (actor.name or "")]


ray.init(num_cpus=8, include_dashboard=True, log_to_driver=False)
try:
    serve.start(http_options={"port": 8123})
    serve.run(build(dict(word.split("=", 1) for word in [*sys.argv[2:], "ray.min_replicas=2"])), name="amusd")
    first = answers()
    kill_one()
    Path(sys.argv[1]).write_text(json.dumps([first, answers()]))
finally:
    serve.shutdown()
    ray.shutdown()
