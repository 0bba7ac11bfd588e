"""`amusd bench`: what one pass, one draft step and one message cost on this machine, beside their floors.

All measurements one after another, as one document and as tables for people.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from amusd.commands.bench.forward import (
    context_lengths,
    measure_contexts,
    measure_decoding,
    measure_passes,
    measure_sampling,
)
from amusd.commands.bench.links import measure_links, recommend
from amusd.commands.bench.pair import english, measure_pair
from amusd.commands.bench.peer import GeneratePeer
from amusd.commands.bench.report import bench_text
from amusd.commands.bench.timing import read_bandwidth
from amusd.config import DrafterConfig, EngineConfig, RunConfig, TransportConfig
from amusd.console import Console
from amusd.files import read_json, write_json
from amusd.models.cached_model import CachedModel
from amusd.models.checkpoint import find_checkpoint
from amusd.models.loading import (
    explain_drafter,
    explain_target,
    load_draft_model,
    load_target,
    model_path,
    target_dtype,
)
from amusd.runtime.cores import allowed_cores, cores_for, pin_to
from amusd.runtime.devices import claim_device, device_of
from amusd.transport.factory import choose_here
from amusd.types import Role


def run_bench(config: RunConfig, console: Console) -> dict[str, Any]:
    """Measure everything; returns the documented JSON without `run_dir` and `environment`.

    First what other processes do, while this one waits; then the models, in this process, on the target's cores.
    """
    engine = config.engine(max_num_seqs=1)
    explain_target(engine, device_of(engine, Role.TARGET))  # what cannot run is refused before anything is measured
    for drafter in engine.drafters:
        explain_drafter(drafter, engine, device_of(engine, Role.DRAFT))
    allowed = allowed_cores()
    links = measure_links(config, allowed, console)
    console.note("the pair at work, in processes of its own")
    pair = measure_pair(_for_one_draft(engine), config.bench)
    device = claim_device(engine, Role.TARGET)
    if device == "cpu":
        pin_to(cores_for(Role.TARGET, allowed, engine.hardware))
    target, tokenizer = load_target(engine, device, console.note)
    prompt = english(tokenizer.encode, config.bench.context_length)
    drafts = _load_drafts(engine)
    models = {"target": target, **drafts}
    pair["memory"]["weight_bytes"] = {name: model.parameter_bytes for name, model in models.items()}
    pair["memory"]["cache_bytes"] = {name: _cache_bytes(model) for name, model in models.items()}
    of_target, of_draft = measure_passes(
        target, drafts, prompt, config.bench, read_bandwidth(device), _progress(console, "forward passes")
    )
    sampling = measure_sampling(
        target, prompt, config.bench, of_target["forward_ms_fixed"], _progress(console, "choosing tokens")
    )
    peer = _load_peer(engine, device, config, console)
    decoding = measure_decoding(target, peer, prompt, config.bench, _progress(console, "plain decoding"))
    text = english(tokenizer.encode, max(context_lengths(target, config.bench), default=0) + target.width)
    context = measure_contexts(target, peer, text, config.bench, _progress(console, "contexts"))
    console.clear_progress()
    return {
        "target": of_target,
        "draft": of_draft,
        "sampling": sampling,
        "decoding": decoding,
        "context": context,
        "transport": links,
        "transport_choice": recommend(choose_here(TransportConfig()), links),
        "peer": {"hf_generate_ms_per_token": decoding["ms_per_token"].get("peer")},
        "pair": pair,
    }


def _load_drafts(engine: EngineConfig) -> dict[str, CachedModel]:
    """The model of every drafter that has one."""
    device = device_of(engine, Role.DRAFT)
    return {
        drafter.kind: load_draft_model(drafter, engine, device)[0]
        for drafter in engine.drafters
        if drafter.can.has_model
    }


def _load_peer(engine: EngineConfig, device: str, config: RunConfig, console: Console) -> GeneratePeer | None:
    if not config.bench.peer:
        return None
    if config.hardware.synthetic is not None:
        console.note("transformers.generate is left out: synthetic weights have no checkpoint")
        return None
    return GeneratePeer(
        str(find_checkpoint(model_path(engine.target))), dtype=target_dtype(engine, device), device=device
    )


def _cache_bytes(model: CachedModel) -> int:
    """Bytes of the cache that a worker keeps: one for the longest sequence."""
    cache = model.new_cache(model.max_length)
    model.prefill([0], cache)  # memory is taken by the first pass
    return cache.nbytes


def _for_one_draft(engine: EngineConfig) -> EngineConfig:
    """The configuration with its first drafter alone: the worker's memory is that of one draft."""
    drafters: tuple[DrafterConfig, ...] = engine.drafters[:1]
    return replace(engine, drafters=drafters)


def _progress(console: Console, label: str) -> Callable[[int, int], None]:
    return lambda done, num_steps: console.progress(label, done, num_steps)


def bench(config: RunConfig, run_directory: Path) -> int:
    """Measure the parts of this machine's pair. The caller has settled cores and threads of this process."""
    console = Console(json_only=config.output == "json")
    result = run_bench(config, console)
    result["complete"] = True
    result["environment"] = read_json(run_directory / "environment.json")
    result["run_dir"] = str(run_directory)
    try:
        write_json(run_directory / "result.json", result)
    finally:
        console.text(bench_text(result))
        console.document(result)
    return 0
