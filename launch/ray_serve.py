"""Many engines by Ray Serve: `serve run amusd_launch.ray_serve:build KEY=VALUE ...` deploys them on a Ray cluster.

Each replica is one engine behind the routes of `amusd serve`; the draft and other ranks are its children. Ray routes
requests, checks and replaces replicas, and scales them between `ray.min_replicas` and `ray.max_replicas`. amusd[ray]
has to be installed on every node.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from amusd.config import RunConfig
from amusd.errors import ConfigError
from amusd.settings import from_mapping, to_mapping

from .compose import compose_config
from .environment import set_environment
from .jobs import with_api_key

_NUM_CPUS = 2.0


class Replica:
    """One engine, as a Ray actor."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        """`settings`: a `RunConfig`. Loads the models. Raises `ConfigError`."""
        from amusd.async_engine import AsyncEngine
        from amusd.engine import Engine
        from amusd.serving.app import make_app
        from amusd.serving.server import make_service

        config = from_mapping(RunConfig, settings)
        engine_config = config.engine_for("serve")
        set_environment(config.hardware.num_threads)
        self._engine = await AsyncEngine(lambda: Engine.start(engine_config)).__aenter__()
        self._service = make_service(self._engine, config)
        self._app = make_app(self._service)

    def __serve_build_asgi_app__(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Mount

        return Starlette(routes=[Mount("/", self._app)])  # Starlette answers ASGI's `lifespan`, as Ray expects

    async def check_health(self) -> None:
        """Raise if Ray should replace this replica."""
        status, document = await self._service.health()
        if status != 200:
            raise RuntimeError(document["status"])

    async def __del__(self) -> None:  # Ray awaits it after the last answer
        await self._engine.aclose()


def options_of(config: RunConfig) -> dict[str, Any]:
    """Ray's options of the deployment. Raises `ConfigError`."""
    own = config.ray
    if "cuda" in "".join(config.hardware.devices) and not own.num_gpus:
        raise ConfigError(f"ray.num_gpus=0: hardware.devices={[*config.hardware.devices]} needs GPUs for each engine")
    return {
        "max_ongoing_requests": config.max_num_seqs + config.serve.max_queue,
        "ray_actor_options": {"num_cpus": _NUM_CPUS, "num_gpus": own.num_gpus},
        "max_constructor_retry_count": 3,
        "graceful_shutdown_timeout_s": config.serve.shutdown_seconds,
        "autoscaling_config": {
            "min_replicas": own.min_replicas,
            "max_replicas": own.max_replicas or own.min_replicas,
            "target_ongoing_requests": config.max_num_seqs,
        },
    }


def application(config: RunConfig) -> Any:
    """The application for `serve.run`. Raises `ConfigError`."""
    from ray import serve

    options = options_of(config)
    # Ray assigns no cores: all replicas of a machine would pin the same ones
    config = dataclasses.replace(config, hardware=dataclasses.replace(config.hardware, pin_cores=False))
    return serve.deployment(serve.ingress()(Replica), name="engines", **options).bind(to_mapping(config))


def build(arguments: dict[str, Any]) -> Any:
    """The application for keys and values from Ray's command line or file. Raises `ConfigError`."""
    typed = [f"{key}={'null' if value is None else value}" for key, value in arguments.items()]
    return application(with_api_key(compose_config(typed)))
