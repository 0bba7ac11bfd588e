"""`launch/slurm.sh` under a Slurm that is played, and `launch/kubernetes/` against schemas: no cluster is here."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.compose import compose_config
from launch.job import COMMANDS, Options
from tests.warm import ROOT

SCRIPT = ROOT / "launch" / "slurm.sh"
MANIFESTS = ROOT / "launch" / "kubernetes"
TOLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
PLAYED_PROGRAM = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
PLAYED = {
    "scontrol": '[ "$1 $2 $3" = "show hostnames node[3-5]" ] && printf "node3\\nnode4\\nnode5\\n"',
    "srun": 'number=0; echo "$@" >> "$OUT.srun"; while [ "${1#--}" != "$1" ]; do shift; done\n'
    'while [ "$number" -lt "$SLURM_JOB_NUM_NODES" ]; do SLURM_PROCID=$number "$@"; number=$((number + 1)); done',
    "python": f'exec {sys.executable} -S -c \'{PLAYED_PROGRAM}\' "$@" >> "$OUT"',
}
JOB = {"SLURM_JOB_ID": "7003", "SLURM_JOB_NODELIST": "node[3-5]"}


def submitted(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    for name, text in PLAYED.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    copy = shutil.copy(SCRIPT, folder / "slurm_script")  # Slurm runs a copy, which has no neighbours
    played = {"PATH": f"{folder}:/usr/bin:/bin", "PYTHON": "python", "OUT": str(folder / "out")}
    return subprocess.run(["bash", str(copy), *arguments], env={**played, **variables}, capture_output=True, text=True)


def started(folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    return [tuple(json.loads(line)) for line in (folder / "out").read_text().splitlines()]


@pytest.mark.parametrize("nodes", [2, 3])
def test_each_node_of_a_slurm_job_gets_its_place_in_one_engine(tmp_path: Path, nodes: int) -> None:
    text = 'prompt=it\'s $HOME, "said" *'
    done = submitted(
        tmp_path,
        "generate",
        "transport.keys=/keys",
        text,
        **JOB,
        SLURM_JOB_NUM_NODES=str(nodes),
        SLURM_CPUS_PER_TASK="12",
        TORCHELASTIC_RUN_ID="outer",
    )
    assert done.returncode == 0, done.stderr
    tasks = started(tmp_path)
    link = ["transport=zeromq", "transport.address=tcp://node3:24007"]
    assert [task for task, _ in tasks] == [
        ["-m", "amusd_launch.run", "generate", *link, "transport.keys=/keys", text]
    ] * nodes
    assert [{name: of[name] for name in TOLD if name in of} for _, of in tasks] == [
        {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(nodes),
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "node3",
            "MASTER_PORT": "24006",
        }
        for rank in range(nodes)
    ]
    options = (tmp_path / "out.srun").read_text().split(" sh -c ")[0].split()
    assert options == [
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--cpus-per-task=12",
    ]
    overrides = Options.parse(tasks[0][0][2:]).overrides
    assert compose_config(overrides).transport.address == "tcp://node3:24007"
    assert compose_config(overrides).prompt == text.removeprefix("prompt=")


def test_an_address_and_ports_of_ones_own_win(tmp_path: Path) -> None:
    ports = {"TARGET_HOST": "10.0.0.1", "STORE_PORT": "5000", "LINK_PORT": "5001"}
    assert submitted(tmp_path, "serve", **JOB, SLURM_JOB_NUM_NODES="2", **ports).returncode == 0
    task, variables = started(tmp_path)[1]
    assert task == ["-m", "amusd_launch.run", "serve", "transport=zeromq", "transport.address=tcp://10.0.0.1:5001"]
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "5000")


@pytest.mark.parametrize(
    ("variables", "shard"),
    [
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "8"}, "3/8"),
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "1", "SHARDS": "8"}, "3/8"),
    ],
)
def test_a_task_of_an_array_is_an_engine_with_its_shard(tmp_path: Path, variables: dict[str, str], shard: str) -> None:
    done = submitted(tmp_path, "generate", "out=a.jsonl", **JOB, SLURM_JOB_NUM_NODES="1", **variables)
    assert done.returncode == 0, done.stderr
    ((task, of),) = started(tmp_path)
    assert task == ["-m", "amusd_launch.main", "generate", "out=a.jsonl", f"shard={shard}"]
    assert "RANK" not in of
    assert compose_config(task[3:]).shards == (3, 8)


@pytest.mark.parametrize(
    ("arguments", "variables", "told"),
    [
        (["generate"], {}, "launch/slurm.sh: start it with sbatch; on one machine, use the amusd command"),
        ([], JOB, "launch/slurm.sh: name a command first: generate, serve or compare"),
        (["prompt=x"], JOB, "launch/slurm.sh: name a command first: generate, serve or compare"),
        (
            ["generate", "out=a"],
            {**JOB, "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "4"},
            "--array: task 0 of 4; expected --array=1-4, or SHARDS=N for some of N",
        ),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, arguments: list[str], variables: dict[str, str], told: str) -> None:
    done = submitted(tmp_path, *arguments, SLURM_JOB_NUM_NODES="2", **variables)
    assert (done.returncode, done.stderr, (tmp_path / "out").exists()) == (2, f"amusd: {told}\n", False)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_a_pair_may_be_a_job(tmp_path: Path, command: str) -> None:
    assert submitted(tmp_path, command, **JOB, SLURM_JOB_NUM_NODES="1").returncode == 0
    assert started(tmp_path)[0][0] == ["-m", "amusd_launch.main", command]


@pytest.mark.parametrize("script", ["slurm.sh", "two_nodes.sh"])
def test_shellcheck_finds_nothing(script: str) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (make test-all brings it)")
    done = subprocess.run([shellcheck, str(ROOT / "launch" / script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# Kubernetes


def manifest(name: str) -> Any:
    return yaml.safe_load((MANIFESTS / name).read_text(encoding="utf-8"))


def pod_templates() -> dict[str, Any]:
    workers = manifest("leaderworkerset.yaml")["spec"]["leaderWorkerTemplate"]
    return {
        "job": manifest("job.yaml")["spec"]["template"],
        "leader": workers["leaderTemplate"],
        "worker": workers["workerTemplate"],
    }


def started_by(pod: str, folder: Path, **variables: str) -> tuple[list[str], dict[str, str]]:
    """What a pod's command starts, as its shell says it, with programs in the places of those it calls."""
    (container,) = pod_templates()[pod]["spec"]["containers"]
    for name in ("amusd", "python3"):
        (folder / name).write_text(f"#!/bin/sh\n{PLAYED['python']}\n")
    for name, text in {"install": 'echo "$@" >> "$OUT.installed"', "getent": "exit 0"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    for path in folder.iterdir():
        path.chmod(0o755)
    played = {"PATH": f"{folder}:/usr/bin:/bin", "OUT": str(folder / "out")}
    done = subprocess.run(container["command"], env={**played, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ((arguments, found),) = started(folder)
    return arguments, found


@pytest.mark.parametrize("index", [0, 7])
def test_a_pod_of_the_job_answers_its_shard(tmp_path: Path, index: int) -> None:
    arguments, _ = started_by("job", tmp_path, JOB_COMPLETION_INDEX=str(index))
    assert arguments[0] == "generate"
    config = compose_config(arguments[1:])
    spec = manifest("job.yaml")["spec"]
    assert config.shards == (index + 1, spec["completions"])
    assert spec["completionMode"] == "Indexed"
    check_pod("job", num_gpus=len(config.hardware.devices), paths=[config.workload.path, config.out])


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
    check_pod(pod, num_gpus=config.target_tensor_parallel_size if pod == "leader" else 1, paths=[])


def check_pod(name: str, num_gpus: int, paths: list[str | None]) -> None:
    spec = pod_templates()[name]["spec"]
    (container,) = spec["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(num_gpus)
    volumes = {volume["name"] for volume in spec["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == volumes
    assert all(str(path).startswith(f"{mounts['data']}/") for path in paths)
    assert spec["securityContext"]["runAsUser"] == 10001  # that of the Dockerfile
    assert not container["securityContext"]["allowPrivilegeEscalation"]


LEADER_WORKER_SET = {
    "spec": {"replicas": int, "leaderWorkerTemplate": dict},
    "leaderWorkerTemplate": {"size": int, "restartPolicy": str, "leaderTemplate": dict, "workerTemplate": dict},
}
"""The fields that we use of the LeaderWorkerSet API, version v1."""


def test_the_leader_worker_set_has_the_fields_of_its_api() -> None:
    document = manifest("leaderworkerset.yaml")
    assert (document["apiVersion"], document["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    template = document["spec"]["leaderWorkerTemplate"]
    for found, fields in ((document["spec"], "spec"), (template, "leaderWorkerTemplate")):
        assert {key: type(value) for key, value in found.items()} == LEADER_WORKER_SET[fields]
    assert template["restartPolicy"] in ("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None")


def test_kubernetes_own_schemas_hold() -> None:
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("kubernetes-validate is not installed (make test-all brings it)")
    import kubernetes_validate

    pods = [
        {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {"name": name, **template["metadata"]}}
        for name, template in pod_templates().items()
    ]
    for document in (manifest("job.yaml"), *pods):
        kubernetes_validate.validate(document, "1.37", strict=True)
    document = manifest("job.yaml")
    document["spec"]["completion"] = document["spec"].pop("completions")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, "1.37", strict=True)
