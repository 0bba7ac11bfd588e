"""Many engines under Ray: the calls of Ray, without Ray; and with Ray installed, tiny models (long)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from amusd.errors import ConfigError
from amusd.settings import to_mapping
from launch.compose import compose_config
from launch.ray_serve import Replica, application, build, options_of
from tests.launch.processes import assert_gone, descendants

from .small_pair import save_pair

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["ray.min_replicas=0"], "ray.min_replicas=0: expected a whole number from 1 to "),
        (["hardware=two_gpus"], "ray.num_gpus=0: hardware.devices="),
    ],
)
def test_what_cannot_be_is_one_line(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        options_of(compose_config(overrides))


def test_an_engine_that_makes_no_tokens_is_replaced() -> None:
    async def health() -> tuple[int, dict[str, str]]:
        return 503, {"status": "failing: RankLostError"}

    replica = SimpleNamespace(_service=SimpleNamespace(health=health))
    with pytest.raises(RuntimeError, match=r"^failing: RankLostError$"):
        asyncio.run(Replica.check_health(replica))  # type: ignore[arg-type]


def test_no_engine_keeps_to_cores_since_all_of_a_machine_would_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def deployment(_kind: type, *, name: str, **_options: Any) -> Any:
        return SimpleNamespace(bind=lambda *arguments: (name, *arguments))

    serve = SimpleNamespace(deployment=deployment, ingress=lambda: lambda kind: kind)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve))
    config = compose_config(["hardware.pin_cores=true"])
    name, settings = application(config)
    assert name == "engines"
    assert settings["hardware"] == {**to_mapping(config)["hardware"], "pin_cores": False}


def test_nothing_in_a_file_of_rays_is_nothing_for_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMUSD_API_KEY", raising=False)
    monkeypatch.setattr("launch.ray_serve.application", lambda config: config)
    config = build({"serve.api_key": None, "ray.max_replicas": None, "hardware.pin_cores": True})
    assert (config.serve.api_key, config.ray.max_replicas, config.hardware.pin_cores) == (None, None, True)


def test_a_replica_answers_as_a_server_does_and_ends_with_its_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("starlette", reason="the server is not installed: pip install 'amusd[serve]'")
    config = compose_config([*save_pair(tmp_path), "hardware.pin_cores=false"])
    before = {*descendants(os.getpid())}
    body = {"model": "target", "prompt": "a", "max_tokens": 4, "ignore_eos": True}

    async def answer() -> Any:
        replica = Replica.__new__(Replica)
        await replica.__init__(to_mapping(config))  # type: ignore[misc]
        await replica.check_health()
        transport = httpx.ASGITransport(replica.__serve_build_asgi_app__())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            response = await client.post("/v1/completions", json=body)
        await replica.__del__()
        monkeypatch.delattr(Replica, "__del__")
        return response.raise_for_status().json()

    assert asyncio.run(answer())["usage"]["completion_tokens"] == 4
    assert_gone([*{*descendants(os.getpid())} - before])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: make test-all")
@pytest.mark.skipif(os.geteuid() != 0 or which("unshare") is None, reason="Ray listens on all networks of a machine")
def test_ray_replaces_an_engine_that_is_killed_and_the_answers_stay_the_same(tmp_path: Path) -> None:
    words = [word for word in save_pair(tmp_path) if not word.startswith("sampling.")]
    program = [sys.executable, "-m", "tests.launch.ray_program", tmp_path / "answers.json", *words]
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    done = subprocess.run([*alone, *program], cwd=ROOT, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = json.loads((tmp_path / "answers.json").read_text())
    assert len(before) == 4
    assert all(before)
    assert after == before
