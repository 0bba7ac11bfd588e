"""Many engines: what Ray is told, without Ray; and, where Ray is installed, all of it with tiny models (long)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from amusd.errors import ConfigError
from launch.compose import compose_config
from launch.ray_serve import ENGINES, INGRESS, deployments, main

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


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: make test-all")
def test_an_engine_that_is_killed_and_a_restart_of_all_cost_no_token(tmp_path: Path) -> None:
    """The experiment on tiny models; where it may, in a network of its own, since Ray listens on all of a machine's."""
    words = [*save_pair(tmp_path), "max_model_len=4096", "max_num_seqs=4"]
    overrides = [word for word in words if not word.startswith(("sampling.", "max_model_len=256"))]
    command = [sys.executable, "experiments/many_engines/run.py", "--quick", "--runs", tmp_path / "runs", "--"]
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    can_be_alone = os.geteuid() == 0 and subprocess.run([*alone, "true"], capture_output=True).returncode == 0
    done = subprocess.run(
        [*(alone if can_be_alone else ()), *command, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=840
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "runs" / "quick.json").read_text())
    assert found["left"] == 0
    assert [found["parts"][name]["requests"] for name in ("quiet", "kill", "restart")] == [6, 24, 24]
    for name, part in found["parts"].items():
        assert (part["wrong"], part["refused"], part["answered"] + part["cut_off"]) == (0, 0, part["requests"])
        assert name == "kill" or part["cut_off"] == 0
    assert found["parts"]["quiet"]["moves"] == 0
    assert [len(found["parts"][name]["by_engine"]) for name in ("kill", "restart")] == [3, 4]
