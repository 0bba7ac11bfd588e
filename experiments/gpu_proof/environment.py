"""The machine, its software, and the costs of capturing."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
import random
import shutil
import subprocess

import torch

from amusd.commands.bench import read_bandwidth
from amusd.config.engine import ModelShape
from amusd.runner.model_runner import extend
from experiments.gpu_proof import adapter
from experiments.gpu_proof.plan import GPU
from experiments.gpu_proof.records import Job
from launch.environment import describe_environment

_QUERIES = (["nvidia-smi"], ["nvidia-smi", "topo", "-m"], ["nvidia-smi", "-q", "-d", "CLOCK,POWER"])
_PROBE_SECONDS = 20.0
_EXCERPT_LINES = 45
_SHORT = 2048


def versions(job: Job) -> None:
    """Record machine, versions, device, bandwidth, and the output of `nvidia-smi` if it is installed."""
    job.write("machine", load_average=os.getloadavg()[0], **describe_environment())
    job.write(
        "torch",
        version=torch.__version__,
        cuda=torch.version.cuda,
        triton=importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None,
    )
    if job.scale.device == GPU:
        properties = torch.cuda.get_device_properties(0)
        job.write(
            "device",
            name=properties.name,
            memory_gb=properties.total_memory / 1e9,
            capability=f"{properties.major}.{properties.minor}",
            multiprocessors=properties.multi_processor_count,
            num_devices=torch.cuda.device_count(),
        )
    job.write("bandwidth", gb_s=read_bandwidth(job.scale.device))
    for query in _QUERIES if shutil.which("nvidia-smi") else ():
        done = subprocess.run(query, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
        job.write("nvidia_smi", query=" ".join(query), lines=done.stdout.splitlines()[:_EXCERPT_LINES])


def graphs(job: Job) -> None:
    """Record for each shape and role: times to load and capture, number of graphs, memory beyond weights and cache."""
    for role, shape in (("draft", job.scale.draft), ("target", job.scale.target)):
        _capture_all(job, role, shape, min(_SHORT, job.scale.max_model_len))


def long_graphs(job: Job) -> None:
    """Record the same for the longest sequences, and for a larger model."""
    _capture_all(job, "draft", job.scale.draft, job.scale.max_model_len)
    _capture_all(job, "target", job.scale.target, job.scale.max_model_len)
    _capture_all(job, "target", job.scale.large, min(_SHORT, job.scale.max_model_len))


def _capture_all(job: Job, role: str, shape: ModelShape, max_model_len: int) -> None:
    config = adapter.engine_config(job.scale.device, shape, job.scale.draft, max_model_len=max_model_len)
    checked = adapter.prepared_target(config) if role == "target" else adapter.prepared_draft(config)
    is_alive, weight_bytes = _replays_are_not_empty(checked), checked.model.weight_bytes
    del checked
    _release(job.scale.device)
    before = adapter.num_graphs()
    if role == "target":
        prepared = adapter.prepared_target(config)
        load_seconds, capture_seconds, kept = prepared.load_seconds, prepared.prepare_seconds, [prepared]
        del prepared
    else:
        load_seconds, capture_seconds, *kept = adapter.prepared_drafters(config)
    job.write(
        "graphs",
        role=role,
        shape=shape,
        max_model_len=max_model_len,
        load_seconds=load_seconds,
        capture_seconds=capture_seconds,
        number=adapter.num_graphs() - before,
        are_not_empty=is_alive,
        weights_gb=weight_bytes / 1e9,
        **_memory(job.scale.device),
    )
    del kept
    _release(job.scale.device)


def _release(device: str) -> None:
    gc.collect()
    if device == GPU:
        torch.cuda.empty_cache()


def _memory(device: str) -> dict[str, float]:
    if device != GPU:
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated_gb": torch.cuda.memory_allocated(device) / 1e9,
        "reserved_gb": torch.cuda.memory_reserved(device) / 1e9,
        "used_gb": (total - free) / 1e9,
    }


def _replays_are_not_empty(prepared: adapter.Prepared) -> bool:
    """Whether two prompts get different tokens, and each the same again: an empty graph would repeat an output."""
    model, cache = prepared.model, prepared.cache
    chosen = []
    for seed in (1, 2, 1):
        cache.truncate(0)
        prompt = token_ids(model.num_ids, 24, seed)
        model.prefill(prompt[:-1], cache)
        chosen.append(extend(model, prompt[-1:], cache, 6))
    return chosen[0] == chosen[2] != chosen[1]


def token_ids(num_ids: int, number: int, seed: int) -> list[int]:
    """Random ids."""
    chance = random.Random(seed)  # noqa: S311 - a prompt, not a secret
    return [chance.randrange(num_ids) for _ in range(number)]
