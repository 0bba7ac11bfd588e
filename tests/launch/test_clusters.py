"""The commands that `launch/slurm.sh` and the pods of `launch/kubernetes/` start, in simulated clusters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from amusd.config import RunConfig
from launch.run import RankInfo, compose
from tests.warm import ROOT

MANIFESTS = ROOT / "launch" / "kubernetes"
PLAYED_PROGRAM = "import json, sys; print(json.dumps(sys.argv[1:]))"
PLAYED = f'exec {sys.executable} -S -c \'{PLAYED_PROGRAM}\' "$@" >> "$OUT"'


def started(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "out").read_text().splitlines()]


def played(folder: Path, **programs: str) -> dict[str, str]:
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", "OUT": str(folder / "out")}


def check_line(arguments: list[str], rank: int, processes: tuple[int, int], address: str) -> RunConfig:
    """The configuration that one node's torchrun is started with, as that of one engine over two nodes."""
    flags = ["--nnodes=2", f"--node-rank={rank}", f"--nproc-per-node={processes[rank]}"]
    flags += [f"--master-addr={address}", "--master-port=29500", "-m", "amusd_launch.run"]
    assert arguments[: len(flags) + 2] == ["-m", "torch.distributed.run", *flags]
    own = RankInfo(rank=rank, size=sum(processes), local_rank=0, local_size=processes[rank])
    command, config = compose(arguments[len(flags) + 2 :], own)
    assert command == "serve"
    assert (config.transport.address, config.transport.keys) == (f"tcp://{address}:29501", "/tmp/keys")
    return config


def test_each_node_of_a_slurm_job_gets_its_place_in_one_engine(tmp_path: Path) -> None:
    srun = """if [ "$1" = --nodes=1 ]; then echo "10.0.0.3 172.17.0.1 "; exit; fi
        while [ "${1#--}" != "$1" ]; do shift; done
        for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@" || exit; done"""
    scontrol = '[ "$*" = "show hostnames node[3-4]" ] && printf "node3\\nnode4\\n"'
    job = {"SLURM_JOB_NODELIST": "node[3-4]", "SLURM_NNODES": "2", "PROCESSES": "2 1"}
    text = 'prompt=it\'s $HOME, "said" *'
    done = subprocess.run(
        [str(ROOT / "launch" / "slurm.sh"), "serve", "target_tensor_parallel_size=2", "transport.keys=/tmp/keys", text],
        env={**played(tmp_path, srun=srun, scontrol=scontrol, python3=PLAYED), **job},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for rank, arguments in zip((0, 1), started(tmp_path), strict=True):
        config = check_line(arguments, rank, (2, 1), "10.0.0.3")
        assert config.prompt == text.removeprefix("prompt=")


def manifest(name: str) -> Any:
    return yaml.safe_load((MANIFESTS / name).read_text(encoding="utf-8"))


def pod_templates() -> dict[str, Any]:
    workers = manifest("leaderworkerset.yaml")["spec"]["leaderWorkerTemplate"]
    return {"leader": workers["leaderTemplate"], "worker": workers["workerTemplate"]}


@pytest.mark.parametrize(("index", "pod"), [(0, "leader"), (1, "worker")])
def test_the_pods_of_a_leader_worker_set_are_the_two_roles_of_one_engine(tmp_path: Path, index: int, pod: str) -> None:
    (container,) = pod_templates()[pod]["spec"]["containers"]
    template = manifest("leaderworkerset.yaml")["spec"]["leaderWorkerTemplate"]
    key = {"AMUSD_API_KEY": "secret"} if pod == "leader" else {}
    told = {"LWS_WORKER_INDEX": str(index), "LWS_GROUP_SIZE": str(template["size"]), "LWS_LEADER_ADDRESS": "lead"}
    there = played(tmp_path, python3=PLAYED, install='echo "$@" >> "$OUT.installed"', getent="exit 0")
    done = subprocess.run(container["command"], env={**there, **told, **key}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (arguments,) = started(tmp_path)
    config = check_line(arguments, index, (8, 1), "lead")
    assert config.serve.api_key == key.get("AMUSD_API_KEY")
