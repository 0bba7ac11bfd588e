"""Many engines: what Ray is told, without Ray; and, where Ray is installed, all of it with tiny models (long)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from amusd.errors import ConfigError, PeerFailedError
from amusd.settings import to_mapping
from launch.compose import compose_config
from launch.process_tree import descendants
from launch.ray_serve import ENGINES, INGRESS, Ingress, Replica, _see_all_gpus, application, deployments, main

from .small_pair import save_pair

ROOT = Path(__file__).parents[2]


def test_each_rank_has_a_bundle_and_all_of_an_engine_are_on_one_machine() -> None:
    config = compose_config(["target=hf", "target.model=/m", "target_tensor_parallel_size=4", "ray.num_gpus=1"])
    engines = deployments(config)[ENGINES]
    assert engines["placement_group_bundles"] == [{"CPU": 1.0, "GPU": 1.0}] * 5
    assert engines["placement_group_strategy"] == "STRICT_PACK"
    assert engines["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 1.0}  # no more than a bundle, as Ray wants it
    assert deployments(compose_config([]))[ENGINES]["placement_group_bundles"] == [{"CPU": 1.0}] * 2


def test_a_number_of_engines_is_fixed_and_two_are_limits() -> None:
    options = deployments(compose_config(["ray.min_replicas=3"]))
    assert options[ENGINES]["num_replicas"] == 3
    assert "autoscaling_config" not in options[ENGINES]
    options = deployments(compose_config(["ray.max_replicas=4", "max_num_seqs=6"]))
    limits = {"min_replicas": 1, "max_replicas": 4}
    assert options[ENGINES]["autoscaling_config"] == {**limits, "target_ongoing_requests": 6}
    assert options[INGRESS]["autoscaling_config"].items() >= limits.items()


def test_the_keys_of_serve_hold() -> None:
    config = compose_config(["max_num_seqs=6", "serve.max_queue=10", "serve.shutdown_seconds=7"])
    engines = deployments(config)[ENGINES]
    assert (engines["max_ongoing_requests"], engines["max_queued_requests"]) == (16, 10)
    assert engines["graceful_shutdown_timeout_s"] == 7


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["ray.max_replicas=0"], "ray.max_replicas=0: must be at least ray.min_replicas=1"),
        (["ray.min_replicas=0"], "ray.min_replicas=0: must be at least 1"),
        (["ray.num_gpus=2"], "ray.num_gpus=2.0: must be between 0 and 1"),
        (["ray.num_cpus=0"], "ray.num_cpus=0.0: must be above 0"),
        (["ray.target_requests=0"], "ray.target_requests=0.0: must be above 0"),
        (["hardware=two_gpus"], "ray.num_gpus=0: with hardware.devices="),
    ],
)
def test_what_cannot_be_is_one_line(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        deployments(compose_config(overrides))


def test_without_ray_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("launch.signals.ignore_signals", lambda: None)  # the process goes on
    assert main([]) == 2
    assert capsys.readouterr().err == "amusd: ray: needs ray; pip install 'amusd[ray]'\n"


class Engines:
    """The handle of the engines, as far as an ingress uses it: one answer, which may end with an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked: Any = None
        self.sent: Any = None
        self.is_cancelled = False
        self.answer = self

    def options(self, **options: Any) -> Engines:
        self.asked = options
        return self

    def remote(self, *sent: Any) -> Engines:
        self.sent = sent
        return self

    async def __aiter__(self) -> AsyncGenerator[str, None]:
        yield "taken"
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        self.is_cancelled = True


class ActorError(Exception):
    """Ray's, when an actor is gone."""


class PressureError(Exception):
    """Ray's, when a deployment has too many requests."""


class UnavailableError(Exception):
    """Ray's, when a deployment cannot be started."""


@pytest.fixture
def ingress(monkeypatch: pytest.MonkeyPatch) -> Ingress:
    pytest.importorskip("fastapi", reason="the server is not installed: pip install 'amusd[serve]'")
    names = {"BackPressureError": PressureError, "DeploymentUnavailableError": UnavailableError}
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.exceptions", SimpleNamespace(RayActorError=ActorError))
    monkeypatch.setitem(sys.modules, "ray.serve", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "ray.serve.exceptions", SimpleNamespace(**names))
    return Ingress(Engines(), to_mapping(compose_config([])))


async def asked(ingress: Ingress) -> list[Any]:
    scope = {"type": "http", "path": "/v1/models", "app": object()}
    return [message async for message in ingress._ask(scope, b"{}", "a conversation")]


def test_an_ingress_asks_the_engine_of_a_conversation(ingress: Ingress) -> None:
    assert asyncio.run(asked(ingress)) == ["taken"]
    assert ingress._engines.asked == {"stream": True, "session_id": "a conversation"}
    assert ingress._engines.sent == ({"type": "http", "path": "/v1/models"}, b"{}")
    assert ingress._engines.is_cancelled


def test_an_engine_that_is_gone_for_ray_is_lost_for_the_front(ingress: Ingress) -> None:
    from amusd.serving.front import EngineLostError

    ingress._engines.error = ActorError("killed")
    with pytest.raises(EngineLostError, match=r"^killed$"):
        asyncio.run(asked(ingress))
    assert ingress._engines.is_cancelled


@pytest.mark.parametrize(("error", "status"), [(PressureError(), 429), (UnavailableError(), 503)])
def test_what_no_engine_can_take_is_refused(ingress: Ingress, error: Exception, status: int) -> None:
    from amusd.serving.requests import RequestError

    ingress._engines.error = error
    with pytest.raises(RequestError) as raised:
        asyncio.run(asked(ingress))
    assert raised.value.status == status
    assert ingress._engines.is_cancelled


def test_an_engine_sees_the_gpus_of_all_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    bundles = [{"CPU": 1, "GPU": 0.5}, {"CPU": 1, "GPU": 0.5}, {"CPU": 1}, {"CPU": 1, "GPU": 1}]
    gpus = {1: ["3"], 3: ["5"]}

    async def shown(index: int) -> list[str]:
        return gpus[index]

    def options(*, scheduling_strategy: tuple[Any, int], num_gpus: float, **_: Any) -> Any:
        assert num_gpus == bundles[scheduling_strategy[1]]["GPU"]
        return SimpleNamespace(remote=lambda: shown(scheduling_strategy[1]))

    util = SimpleNamespace(get_current_placement_group=lambda: SimpleNamespace(bundle_specs=bundles))
    task = SimpleNamespace(options=options)
    ray = SimpleNamespace(util=util, get_gpu_ids=lambda: [3], remote=lambda _function: task)
    strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, index: (group, index))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    asyncio.run(_see_all_gpus())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"


@pytest.mark.parametrize("lost", ["a rank", "the draft", "the engine"])
def test_an_engine_that_has_lost_what_it_needs_is_replaced(lost: str) -> None:
    def failure(of: str) -> PeerFailedError | None:
        return PeerFailedError(f"{of} is gone") if of == lost else None

    async def health() -> tuple[int, dict[str, str]]:
        return (503, {"status": "the engine is gone"}) if lost == "the engine" else (200, {})

    followers = SimpleNamespace(failure=lambda: failure("a rank"))
    drafts = SimpleNamespace(followers=followers, start_failure=lambda: failure("the draft"))
    replica = SimpleNamespace(_drafts=drafts, _gate=SimpleNamespace(service=SimpleNamespace(health=health)))
    with pytest.raises((PeerFailedError, RuntimeError), match=f"^{lost} is gone$"):
        asyncio.run(Replica.check_health(replica))  # type: ignore[arg-type]


def test_no_engine_keeps_to_cores_since_all_of_a_machine_would_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def deployment(_kind: type, *, name: str, **_options: Any) -> Any:
        return SimpleNamespace(bind=lambda *arguments: (name, *arguments))

    serve = SimpleNamespace(deployment=deployment, ingress=lambda: lambda kind: kind)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve))
    config = compose_config(["hardware.pin_cores=true"])
    name, engines, settings = application(config)
    assert settings["hardware"] == {**to_mapping(config)["hardware"], "pin_cores": False}
    assert (name, engines) == (INGRESS, (ENGINES, settings))


def test_a_replica_answers_as_a_server_does_and_ends_with_its_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi", reason="the server is not installed: pip install 'amusd[serve]'")
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="one"))
    serve = SimpleNamespace(get_replica_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve))
    monkeypatch.setattr("launch.ray_serve._see_all_gpus", lambda: asyncio.sleep(0))
    monkeypatch.setattr(tempfile, "tempdir", None)  # which a replica sets
    config = compose_config([*save_pair(tmp_path), "hardware.pin_cores=false"])
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    before = {*descendants(os.getpid())}
    body = json.dumps({"model": "target", "prompt": "a", "max_tokens": 4, "ignore_eos": True}).encode()

    async def answer() -> list[Any]:
        replica = Replica.__new__(Replica)
        await replica.__init__(to_mapping(config))  # type: ignore[misc]
        await replica.check_health()
        messages = [message async for message in replica.answer(scope, body)]
        await replica.__del__()
        monkeypatch.delattr(Replica, "__del__")
        return messages

    taken, start, *parts = asyncio.run(answer())
    assert taken["engine"] == f"one-{os.getpid()}"
    assert start["status"] == 200, parts
    assert json.loads(parts[0]["body"])["usage"]["completion_tokens"] == 4
    assert {*descendants(os.getpid())} <= before
