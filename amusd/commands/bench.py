"""`amusd bench`: times of a pass, a draft step and a message, beside their floors and transformers.

Work is timed in turns, so that a drifting machine treats it alike; figures are medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from amusd.config import HardwareConfig, RunConfig
from amusd.console import Console, table
from amusd.errors import ConfigError, PeerLostError
from amusd.files import read_json, write_json
from amusd.models.adapter import quiet_transformers
from amusd.models.cached_model import CachedModel, extend
from amusd.models.checkpoint import find_checkpoint
from amusd.models.kv_cache import KVCache
from amusd.models.loading import describe_drafter, load_draft_model, load_target, model_path, target_dtype
from amusd.models.numerics import Numerics
from amusd.models.passes import Rows
from amusd.runtime.cores import allowed_cores, cores_for, pin_to
from amusd.runtime.devices import claim_device, device_of
from amusd.transport.factory import ON_ONE_MACHINE
from amusd.transport.latency import measure_one_way
from amusd.types import Role

CONTEXT_LENGTH = 200
WIDTHS = (1, 4, 8, 16)
NUM_ROUNDS = 15
"""Rounds of passes and of chains of draft steps; plain decoding has a third of them."""
NUM_MESSAGES = 2000
WARM_UP_ROUNDS = 2
DRAFT_STEPS = 8
"""In a row, as in a chain: only the first finds its weights displaced by the target's."""
NUM_TOKENS = 24
TEXT = "The harbour master keeps a notebook in which he writes down every ship that enters, and the weather. "

Work = Callable[[], object]
Times = dict[str, list[float]]


def bench(config: RunConfig, run_directory: Path) -> int:
    """Measure links, then models in this process, whose cores and threads are set."""
    console = Console(json_only=config.output == "json")
    engine = config.engine(max_num_seqs=1)
    transport = measure_links(config.hardware, console)
    device, draft_device = claim_device(engine, Role.TARGET), device_of(engine, Role.DRAFT)
    if device == "cpu":
        pin_to(cores_for(Role.TARGET, allowed_cores(), engine.hardware))
    target, tokenizer = load_target(engine, device, console.note)
    drafts: dict[str, CachedModel] = {}
    for drafter in (drafter for drafter in engine.drafters if drafter.can.has_model):
        drafts[drafter.kind], _ = load_draft_model(drafter, engine, draft_device)
        console.note(f"draft: {describe_drafter(drafter, engine, draft_device)}")
    generate = None
    if config.hardware.synthetic is None:  # random weights have no checkpoint
        path = str(find_checkpoint(model_path(engine.target)))
        generate = load_transformers(path, target_dtype(engine, device), device)
    prompt = (tokenizer.encode(TEXT) * CONTEXT_LENGTH)[:CONTEXT_LENGTH]
    result = {
        **measure_models(target, drafts, generate, prompt, console),
        "transport": transport,
        "complete": True,
        "environment": read_json(run_directory / "environment.json"),
        "run_dir": str(run_directory),
    }
    try:
        write_json(run_directory / "result.json", result)
    finally:
        console.text(bench_text(result))
        console.document(result)
    return 0


def measure_links(hardware: HardwareConfig, console: Console) -> dict[str, dict[str, Any]]:
    """One-way times over every link that works here, and why the others do not."""
    cores = tuple(cores_for(role, allowed_cores(), hardware) for role in (Role.TARGET, Role.DRAFT))
    found: dict[str, dict[str, Any]] = {}
    for name, link in ON_ONE_MACHINE.items():
        console.note(f"messages over {name}")
        try:
            taken = measure_one_way(link, num_messages=NUM_MESSAGES, cores=(cores[0], cores[1]))
            found[name] = {"one_way_us_p50": taken.p50_us, "one_way_us_p99": taken.p99_us}
        except (ConfigError, PeerLostError) as error:
            found[name] = {"unavailable": str(error)}
    return found


def measure_models(
    target: CachedModel,
    drafts: Mapping[str, CachedModel],
    generate: Callable[[Sequence[int], int], object] | None,
    prompt: Sequence[int],
    console: Console,
) -> dict[str, Any]:
    """The parts `target`, `draft` and `peer`. `generate`: plain decoding by transformers."""
    bandwidth = read_bandwidth(str(target.device))
    bucketed = replace(target, numerics=Numerics.for_device(str(target.device), width=max(WIDTHS), fixed=False))
    work = {str(width): _pass(bucketed, prompt, width) for width in WIDTHS} | {"fixed": _pass(target, prompt, 1)}
    work |= {f"draft {name}": _draft_steps(model, prompt) for name, model in drafts.items()}
    ms = {name: statistics.median(times) for name, times in time_in_turns(work, NUM_ROUNDS, console).items()}
    decoders = {"amusd": _decoding(target, prompt)}
    if generate is not None:
        decoders["transformers"] = partial(generate, prompt)
    per_token = _ms_per_token(decoders, console)
    console.clear_progress()

    def floor(model: CachedModel) -> dict[str, Any]:
        size = model.weight_bytes
        return {"implementation": model.implementation, "weight_bytes": size, "floor_ms": size / bandwidth / 1e6}

    return {
        "target": {
            **floor(target),
            "context": len(prompt),
            "forward_ms": {str(width): ms[str(width)] for width in WIDTHS},
            "forward_ms_fixed": ms["fixed"],
            "bandwidth_gb_s": bandwidth,
            "ms_per_token": per_token["amusd"],
        },
        "draft": {
            name: {**floor(model), "step_ms": ms[f"draft {name}"] / DRAFT_STEPS} for name, model in drafts.items()
        },
        "peer": {"hf_generate_ms_per_token": per_token.get("transformers")},
    }


def time_in_turns(work: Mapping[str, Work], num_rounds: int, console: Console) -> Times:
    """Milliseconds of each piece of work in each round. The work waits for its device."""
    times: Times = {name: [] for name in work}
    for number in range(WARM_UP_ROUNDS + num_rounds):
        console.progress("rounds", number, WARM_UP_ROUNDS + num_rounds)
        for name, run in work.items():
            start = time.perf_counter()
            run()
            if number >= WARM_UP_ROUNDS:
                times[name].append(1000 * (time.perf_counter() - start))
    return times


def read_bandwidth(device: str) -> float:
    """GB/s (10^9 bytes) of a sequential read by torch's sum, best of seven: the floor of every pass."""
    on_gpu = device.startswith("cuda")
    values = torch.ones((2 << 30 if on_gpu else 256 << 20) // 4, dtype=torch.float32, device=device)
    best = float("inf")
    with torch.inference_mode():
        for _ in range(7):
            start = time.perf_counter()
            values.sum().item()  # waits for a device
            best = min(best, time.perf_counter() - start)
    return 4 * values.numel() / best / 1e9


def load_transformers(path: str, dtype: str, device: str) -> Callable[[Sequence[int], int], object]:
    """Return `generate(prompt, number)`: exactly `number` greedy tokens by stock transformers."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), use_safetensors=True)
    model = model.to(device).eval()
    model.generation_config.eos_token_id = None  # or a run would be shorter than another

    def generate(prompt: Sequence[int], number: int) -> object:
        ids = torch.tensor([prompt], device=device)
        settings = GenerationConfig(max_new_tokens=number, do_sample=False, pad_token_id=0)
        with torch.inference_mode(), quiet_transformers():
            return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)[0, -1].item()

    return generate


def bench_text(document: dict[str, Any]) -> str:
    """The report as tables, each figure beside its floor or its peer."""
    target, peer_ms = document["target"], document["peer"]["hf_generate_ms_per_token"]
    figures = [(f"target, {width} rows", ms, target["floor_ms"]) for width, ms in target["forward_ms"].items()]
    figures.append(("target, fixed width", target["forward_ms_fixed"], target["floor_ms"]))
    figures += [(f"draft step, {name}", step["step_ms"], step["floor_ms"]) for name, step in document["draft"].items()]
    passes = [(name, f"{ms:.2f}", f"{floor:.2f}", f"{ms / floor:.2f}") for name, ms, floor in figures]
    plain = [("amusd", target["ms_per_token"])] + ([] if peer_ms is None else [("transformers.generate", peer_ms)])
    links = [
        (name, *(f"{link[figure]:.1f}" if figure in link else "-" for figure in ("one_way_us_p50", "one_way_us_p99")))
        for name, link in document["transport"].items()
    ]
    where = f"{target['context']} tokens of context; memory reads at {target['bandwidth_gb_s']:.1f} GB/s"
    parts = (
        f"{where}; forward pass: {target['implementation']}",
        table(("pass", "ms", "floor ms", "x floor"), passes),
        table(("plain decoding", "ms/token"), [(name, f"{ms:.2f}") for name, ms in plain]),
        table(("link", "one way us p50", "p99"), links),
    )
    return "\n\n".join(parts)


def _ms_per_token(decoders: Mapping[str, Callable[[int], object]], console: Console) -> dict[str, float]:
    work = {f"{name} {n}": partial(decode, n) for name, decode in decoders.items() for n in (1, 1 + NUM_TOKENS)}
    times = time_in_turns(work, max(1, NUM_ROUNDS // 3), console)
    pairs = {name: zip(times[f"{name} {1 + NUM_TOKENS}"], times[f"{name} 1"], strict=True) for name in decoders}
    return {name: statistics.median((long - short) / NUM_TOKENS for long, short in own) for name, own in pairs.items()}


def _filled(model: CachedModel, prompt: Sequence[int], room: int) -> KVCache:
    cache = model.new_cache(len(prompt) + room)
    model.prefill(prompt, cache)
    return cache


def _pass(model: CachedModel, prompt: Sequence[int], width: int) -> Work:
    cache = _filled(model, prompt, max(WIDTHS))

    def run() -> None:
        cache.truncate(len(prompt))
        model.run([Rows(prompt[:width], cache)])[0].choose()

    return run


def _draft_steps(model: CachedModel, prompt: Sequence[int]) -> Work:
    cache = _filled(model, prompt, DRAFT_STEPS)

    def run() -> None:
        cache.truncate(len(prompt))
        extend(model, prompt[:1], cache, DRAFT_STEPS)

    return run


def _decoding(model: CachedModel, prompt: Sequence[int]) -> Callable[[int], object]:
    cache = model.new_cache(len(prompt) + NUM_TOKENS + 1)

    def run(number: int) -> None:
        cache.truncate(0)
        model.prefill(prompt[:-1], cache)
        extend(model, prompt[-1:], cache, number)

    return run
