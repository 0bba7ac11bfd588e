"""Many engines by Ray Serve: `python launch/ray_serve.py KEY=VALUE ...` deploys them on a running Ray cluster.

    client -> Ray's HTTP proxy -> ingress (`amusd.serving.front`) -> the engine that the conversation belongs to

An engine is a replica: what `amusd serve` is without its socket, with the target in the replica's own process and the
draft and all other ranks as children, which end with it however it ends. Ray starts and replaces replicas, checks their
health, and scales them between `ray.min_replicas` and `ray.max_replicas`; run again, this restarts them one by one.
amusd[ray] has to be installed on every node. docs/serving.md has the rest.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from amusd.config import RunConfig
from amusd.errors import ConfigError, MissingDependencyError
from amusd.settings import from_mapping, to_mapping

if __name__ == "__main__":  # the replicas import what they run from the installed package
    import amusd_launch.ray_serve

    sys.exit(amusd_launch.ray_serve.main(sys.argv[1:]))

from amusd.console import tell, waiting_for
from amusd.runtime.draft_restart import last_line

from .compose import compose_config
from .devices import claim_hardware
from .drafts import ChildDrafts
from .main import with_api_key
from .scratch import scratch_folder
from .signals import exit_code_of

APPLICATION, ENGINES, INGRESS = "amusd", "engines", "ingress"
"""Ray's names for the application and its two deployments."""
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_SCOPE = ("type", "http_version", "scheme", "method", "path", "raw_path", "query_string", "headers", "client", "server")
"""The part of an ASGI scope that an engine is sent; the rest is of the process that has it."""
_LOOK_SECONDS = 0.5
_HEALTH_SECONDS = 5.0
_INGRESS_REQUESTS = 100
"""Requests of an ingress replica from which Ray starts another one, and ten times as many that it takes at most."""


class Replica:
    """One engine, as a Ray actor."""

    async def __init__(self, settings: dict[str, Any]) -> None:
        """`settings`: a `RunConfig`. Loads the models. Raises `ConfigError`."""
        from amusd.async_engine import AsyncEngine
        from amusd.engine import Engine
        from amusd.runtime.cores import allowed_cores
        from amusd.runtime.startup import make_recorder
        from amusd.runtime.supervisor import STOP_SECONDS
        from amusd.serving.app import Gate, make_app
        from amusd.serving.server import make_service
        from amusd.types import Role

        self._resources = AsyncExitStack()
        try:
            config = from_mapping(RunConfig, settings)
            tempfile.tempdir = str(self._resources.enter_context(scratch_folder()))
            await _see_all_gpus()
            drafts = self._drafts = ChildDrafts(config.engine_for("serve"), [], work=None, tell_loss=tell)
            self._resources.callback(drafts.stop)
            self._resources.callback(drafts.followers.stop, STOP_SECONDS)
            drafts.prepare()
            drafts.followers.prepare(config.engine_for("serve"), Role.TARGET, allowed_cores())
            config = claim_hardware(config, Role.TARGET)
            engine_config, recorder = config.engine_for("serve"), make_recorder(Role.TARGET)
            engine = AsyncEngine(lambda: Engine.connect(engine_config, drafts, recorder))
            service = make_service(await self._resources.enter_async_context(engine), config, engine_config)
            self._gate = Gate(make_app(service), service, tell)
        except BaseException:
            await self._resources.aclose()
            raise

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[dict[str, Any], None]:
        """See `amusd.serving.front.Ask`. Cancelling it is the client's going away."""
        from ray import serve

        from amusd.serving.front import TAKEN

        yield {"type": TAKEN, "engine": f"{serve.get_replica_context().replica_id.unique_id}-{os.getpid()}"}
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        request = asyncio.Queue[dict[str, Any]]()
        request.put_nowait({"type": "http.request", "body": body, "more_body": False})
        work = asyncio.ensure_future(self._gate(scope, request.get, messages.put))  # type: ignore[arg-type]
        work.add_done_callback(lambda _work: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def check_health(self) -> None:
        """Raise what Ray is to replace this replica for."""
        failure = self._drafts.followers.failure() or self._drafts.start_failure()
        if failure is not None:
            raise failure
        status, document = await self._gate.service.health()
        if status != 200:
            raise RuntimeError(document["status"])

    async def __del__(self) -> None:  # type: ignore[misc]  # Ray awaits it, behind the last answer
        await self._resources.aclose()


async def _see_all_gpus() -> None:
    """Let this process use the GPUs of all bundles of its placement group; Ray shows it those of the first one."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.get_current_placement_group()
    numbers = [bundle.get("GPU", 0) for bundle in group.bundle_specs] if group is not None else []
    if not any(numbers):
        return
    tell_gpus = ray.remote(lambda: ray.get_gpu_ids())  # noqa: PLW0108 - Ray wants a function of its own to send
    others = [
        tell_gpus.options(
            num_cpus=0, num_gpus=number, scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)
        ).remote()
        for index, number in enumerate(numbers)
        if index and number
    ]
    found = [*ray.get_gpu_ids(), *(gpu for gpus in await asyncio.gather(*others) for gpu in gpus)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(map(str, found)))


class Ingress:
    """The front, as a Ray actor."""

    def __init__(self, engines: Any, settings: dict[str, Any]) -> None:
        """`engines`: the handle of their deployment."""
        self._engines = engines
        self._config = from_mapping(RunConfig, settings)

    def __serve_build_asgi_app__(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Mount

        from amusd.serving.front import Front

        own = self._config
        wait = own.startup_timeout_seconds
        front = Front(self._ask, max_body_bytes=own.serve.max_body_bytes, wait_seconds=wait)
        return Starlette(routes=[Mount("/", front)])  # which answers ASGI's `lifespan`, as Ray wants it

    async def _ask(self, scope: Any, body: bytes, conversation: str) -> AsyncGenerator[Any, None]:
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

        from amusd.serving.front import EngineLostError, unavailable

        sent = {name: scope[name] for name in _SCOPE if name in scope}
        messages = self._engines.options(stream=True, session_id=conversation).answer.remote(sent, body)
        try:
            async for message in messages:
                yield message
        except RayActorError as error:
            raise EngineLostError(str(error)) from error
        except BackPressureError:
            raise unavailable("the queue is full; try again later", "queue_full", status=429) from None
        except DeploymentUnavailableError:
            raise unavailable("no engine could be started; `serve status` says why", "no_engine") from None
        finally:
            messages.cancel()


def deployments(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Ray's options of both deployments. Raises `ConfigError`."""
    ranks, own = config.engine_for("serve").num_ranks, config.ray
    bundle = {name: number for name, number in (("CPU", own.num_cpus), ("GPU", own.num_gpus)) if number}
    if "cuda" in "".join(config.hardware.devices) and not own.num_gpus:
        raise ConfigError(f"ray.num_gpus=0: with hardware.devices={[*config.hardware.devices]} each rank needs a share")
    patience = {"graceful_shutdown_timeout_s": config.serve.shutdown_seconds, "graceful_shutdown_wait_loop_s": 0.5}
    engines = {
        "max_ongoing_requests": config.max_num_seqs + config.serve.max_queue,
        "max_queued_requests": max(1, config.serve.max_queue),
        "ray_actor_options": {"num_cpus": own.num_cpus, "num_gpus": own.num_gpus},
        "placement_group_bundles": [dict(bundle) for _ in range(ranks)],
        "placement_group_strategy": "STRICT_PACK",
        "health_check_period_s": _HEALTH_SECONDS,
        "max_constructor_retry_count": 3,
        "request_router_config": {"request_router_class": _ROUTER},
        **_scaling(own.min_replicas, own.max_replicas or own.min_replicas, own.target_requests or config.max_num_seqs),
        **patience,
    }
    ingress = {
        "max_ongoing_requests": 10 * _INGRESS_REQUESTS,
        "ray_actor_options": {"num_cpus": 0},
        **_scaling(1, own.max_replicas or own.min_replicas, _INGRESS_REQUESTS),
        **patience,
    }
    return {ENGINES: engines, INGRESS: ingress}


def _scaling(least: int, most: int, requests: float) -> dict[str, Any]:
    if least == most:
        return {"num_replicas": most}
    return {"autoscaling_config": {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": requests}}


def application(config: RunConfig) -> Any:
    """What `serve.run` takes. Raises `ConfigError`."""
    from ray import serve

    # Ray keeps no cores apart: replicas of one machine would all take the same
    config = dataclasses.replace(config, hardware=dataclasses.replace(config.hardware, pin_cores=False))
    options, settings = deployments(config), to_mapping(config)
    engines = serve.deployment(Replica, name=ENGINES, **options[ENGINES]).bind(settings)
    return serve.deployment(serve.ingress()(Ingress), name=INGRESS, **options[INGRESS]).bind(engines, settings)


def build(arguments: dict[str, Any]) -> Any:
    """For `import_path: amusd_launch.ray_serve:build` in a file of Ray Serve's; its `args` are keys and values."""
    return application(with_api_key(compose_config([f"{key}={value}" for key, value in arguments.items()])))


def deploy(config: RunConfig) -> None:
    """Deploy on the cluster that this process is connected to, and wait until all runs.

    Raises `ConfigError` where that fails, or is not done within `startup_timeout_seconds` for each replica.
    """
    from ray import serve

    target = serve.RunTarget(application(config), name=APPLICATION)
    serve.start(http_options={"host": config.serve.host, "port": config.serve.port})
    serve.run_many([target], wait_for_applications_running=False, wait_for_ingress_deployment_creation=False)
    seconds = config.startup_timeout_seconds * config.ray.min_replicas
    deadline = time.monotonic() + seconds
    with waiting_for("the replicas", seconds):
        while (status := serve.status().applications[APPLICATION]).status != "RUNNING":
            said = [f"{name}: {last_line(one.message)}" for name, one in status.deployments.items() if one.message]
            if status.status == "DEPLOY_FAILED" or time.monotonic() > deadline:
                raise ConfigError(f"ray: {status.status.value}: {'; '.join([status.message, *said])}")
            time.sleep(_LOOK_SECONDS)


def main(arguments: Sequence[str]) -> int:
    """Deploy; return the exit code."""

    def work() -> int:
        try:
            import ray
            from ray import serve  # noqa: F401 - whether it is there
        except ModuleNotFoundError as error:
            raise MissingDependencyError(f"ray: needs {error.name}; pip install 'amusd[ray]'") from None
        config = with_api_key(compose_config(arguments))
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError:
            raise ConfigError("ray: no cluster is running here: `ray start --head`, or set RAY_ADDRESS") from None
        if not config.ray.num_gpus and ray.cluster_resources().get("GPU"):
            tell("ray.num_gpus=0: no GPU is set aside for the engines, though the cluster has some")
        deploy(config)
        tell(
            f"serving at http://{config.serve.host}:{config.serve.port}; `serve status`, `serve shutdown` for the rest"
        )
        return 0

    return exit_code_of(work)
