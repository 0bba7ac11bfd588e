"""`launch/kubernetes/` against schemas, and what its pods start: no cluster is here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from launch.job import Options

from launch.compose import compose_config
from tests.warm import ROOT

MANIFESTS = ROOT / "launch" / "kubernetes"
TOLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
PLAYED_PROGRAM = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
PLAYED = f'exec {sys.executable} -S -c \'{PLAYED_PROGRAM}\' "$@" >> "$OUT"'


def started(folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    return [tuple(json.loads(line)) for line in (folder / "out").read_text().splitlines()]


def test_shellcheck_finds_nothing() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (make test-all brings it)")
    done = subprocess.run([shellcheck, str(ROOT / "launch" / "two_nodes.sh")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def manifest(name: str) -> Any:
    return yaml.safe_load((MANIFESTS / name).read_text(encoding="utf-8"))


def pod_templates() -> dict[str, Any]:
    workers = manifest("leaderworkerset.yaml")["spec"]["leaderWorkerTemplate"]
    return {"leader": workers["leaderTemplate"], "worker": workers["workerTemplate"]}


def started_by(pod: str, folder: Path, **variables: str) -> tuple[list[str], dict[str, str]]:
    """What a pod's command starts, as its shell says it, with programs in the places of those it calls."""
    (container,) = pod_templates()[pod]["spec"]["containers"]
    for name, text in {"python3": PLAYED, "install": 'echo "$@" >> "$OUT.installed"', "getent": "exit 0"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    for path in folder.iterdir():
        path.chmod(0o755)
    played = {"PATH": f"{folder}:/usr/bin:/bin", "OUT": str(folder / "out")}
    done = subprocess.run(container["command"], env={**played, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ((arguments, found),) = started(folder)
    return arguments, found


@pytest.mark.parametrize(("index", "pod"), [(0, "leader"), (1, "worker")])
def test_the_pods_of_a_leader_worker_set_are_the_two_roles_of_one_engine(tmp_path: Path, index: int, pod: str) -> None:
    template = manifest("leaderworkerset.yaml")["spec"]["leaderWorkerTemplate"]
    key = {"AMUSD_API_KEY": "secret"} if pod == "leader" else {}
    arguments, variables = started_by(
        pod,
        tmp_path,
        LWS_WORKER_INDEX=str(index),
        LWS_GROUP_SIZE=str(template["size"]),
        LWS_LEADER_ADDRESS="lead",
        **key,
    )
    assert arguments[:2] == ["-m", "amusd_launch.run"]
    options = Options.parse(arguments[2:])
    config = compose_config(options.overrides)
    assert options.command == "serve"
    assert {name: variables[name] for name in TOLD if name in variables} == {
        "RANK": str(index),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "lead",
        "MASTER_PORT": "29500",
    }
    assert (config.transport.address, config.transport.keys) == ("tcp://lead:29501", "/tmp/keys")
    assert config.serve.api_key == key.get("AMUSD_API_KEY")
    check_pod(pod, num_gpus=config.target_tensor_parallel_size if pod == "leader" else 1)


def check_pod(name: str, num_gpus: int) -> None:
    spec = pod_templates()[name]["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(num_gpus)
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert spec["securityContext"]["runAsUser"] == 10001  # that of the Dockerfile
    assert not container["securityContext"]["allowPrivilegeEscalation"]
