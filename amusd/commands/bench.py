"""`amusd bench`: times of a pass, a draft step and a message, beside their floors and transformers.

Work is timed in turns, so that a drifting machine treats it alike, alone and while the other worker's device computes;
figures are medians.
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from amusd.commands.latency import LONG, measure_one_way
from amusd.commands.neighbour import Neighbour
from amusd.config import DecodingConfig, HardwareConfig, RunConfig, TransportConfig
from amusd.console import Console, table
from amusd.drafters.base import Expansion
from amusd.drafters.model import ModelDrafter
from amusd.drafters.ngram import NgramCache
from amusd.errors import ConfigError, PeerLostError
from amusd.files import read_json
from amusd.logs import end_progress, logger, show_progress
from amusd.models.cached_model import CachedModel, extend
from amusd.models.checkpoint import find_checkpoint
from amusd.models.kv_cache import KVCache
from amusd.models.loading import describe_drafter, load_draft_model, load_target, model_path, target_dtype
from amusd.models.numerics import Numerics
from amusd.models.passes import Rows
from amusd.models.transformers_models import quiet_transformers
from amusd.protocol.draft_session import Node, Transition
from amusd.runtime.cores import allowed_cores, cores_for, pin_to
from amusd.runtime.devices import claim_device, device_of, settle_devices, warn_of_sharing
from amusd.transport.factory import ON_ONE_MACHINE

CONTEXT_LENGTH = 200
WIDTHS = (1, 4, 8, 16)
NUM_ROUNDS = 9
NUM_MESSAGES = 2000
WARM_UP_ROUNDS = 2
DRAFT_STEPS = 8
"""In a row, as in a chain: only the first finds its weights displaced by the target's."""
NUM_TOKENS = 24
TEXT = "The harbour master keeps a notebook in which he writes down every ship that enters, and the weather. "

Work = Callable[[], object]


def run_bench(config: RunConfig, run_directory: Path, console: Console) -> int:
    """Measure links, then models in this process, whose threads are set. Returns the exit code.

    Raises `ConfigError` for what cannot be measured.
    """
    engine = config.engine(max_num_seqs=1)
    warn_of_sharing(engine)
    engine = replace(engine, hardware=settle_devices(engine))
    logger.info("messages over each link")
    transport = dict(measure_links(ON_ONE_MACHINE, engine.hardware, NUM_MESSAGES))
    device, draft_device = claim_device(engine, "target"), device_of(engine, "draft")
    cores = allowed_cores()
    if device == "cpu":
        pin_to(cores_for("target", cores, engine.hardware))
    drafts: dict[str, CachedModel] = {}
    for drafter in (drafter for drafter in engine.drafters if drafter.can.has_model):
        model, _ = load_draft_model(drafter, engine, draft_device)
        assert isinstance(model, CachedModel)
        drafts[drafter.kind] = model
        logger.info(f"draft: {describe_drafter(drafter, engine, draft_device)}")
    target, tokenizer = load_target(engine, device)
    generate = None
    if config.hardware.synthetic is None:  # random weights have no checkpoint
        path = str(find_checkpoint(model_path(engine.target)))
        generate = load_transformers(path, target_dtype(engine, device), device)
        if generate is None:
            logger.info(f"transformers is left out: {device} has no room for its copy of the target beside ours")
    prompt = (tokenizer.encode(TEXT) * CONTEXT_LENGTH)[:CONTEXT_LENGTH]
    with Neighbour(draft_device, cores_for("draft", cores, engine.hardware)) as neighbour:
        result = {
            **measure_models(target, drafts, generate, prompt, neighbour),
            "transport": transport,
            "complete": True,
            "environment": read_json(run_directory / "environment.json"),
        }
    console.conclude(result, bench_text(result), run_directory)
    return 0


def measure_links(
    links: Mapping[Any, TransportConfig], hardware: HardwareConfig, num_messages: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and one-way times of each link, or why it does not work here (`unavailable`)."""
    cores = [cores_for(role, allowed_cores(), hardware) for role in ("target", "draft")]
    for name, link in links.items():
        try:
            measure = partial(measure_one_way, link, num_messages=num_messages, cores=(cores[0], cores[1]))
            taken = dict(zip(("one_way_us_p50", "one_way_us_p99"), measure(), strict=True))
            if link.kind == "nccl":  # which carries no short message
                taken["long_one_way_us_p50"] = measure(message=LONG)[0]
            yield name, taken
        except (ConfigError, PeerLostError) as error:  # noqa: PERF203 - a link takes seconds
            yield name, {"unavailable": str(error)}


def measure_models(
    target: CachedModel,
    drafts: Mapping[str, CachedModel],
    generate: Callable[[Sequence[int], int], object] | None,
    prompt: Sequence[int],
    neighbour: Neighbour,
) -> dict[str, Any]:
    """Passes, draft steps and plain decoding. `generate`: plain decoding by transformers."""
    bandwidth = read_bandwidth(str(target.device))
    rule = Numerics.for_device(str(target.device), width=max(WIDTHS), fixed=False)
    bucketed = replace(target, options=replace(target.options, numerics=rule))
    work = {str(width): one_pass(bucketed, prompt, width) for width in WIDTHS} | {"fixed": one_pass(target, prompt, 1)}
    for name, model in drafts.items():
        work[name] = _steps(model, prompt, DRAFT_STEPS)
        drafter = ModelDrafter(model, NgramCache())
        work |= {f"{name} {width}": _tree_step(drafter, prompt, width) for width in WIDTHS}
    alone, beside = time_in_turns(work, neighbour)
    others = {"plain": _steps(target, prompt, NUM_TOKENS)}
    if generate is not None:
        others |= {"first": partial(generate, prompt, 1), "all": partial(generate, prompt, 1 + NUM_TOKENS)}
    ms, _ = time_in_turns(others)

    def floor(model: CachedModel) -> dict[str, float]:
        return {"weight_bytes": model.weight_bytes, "floor_ms": model.weight_bytes / bandwidth / 1e6}

    def by_width(ms: Mapping[str, float], prefix: str = "") -> dict[str, float]:
        return {str(width): ms[f"{prefix}{width}"] for width in WIDTHS}

    return {
        "target": {
            **floor(target),
            "implementation": target.implementation,
            "context": len(prompt),
            "forward_ms": by_width(alone),
            "beside_ms": by_width(beside),
            "forward_ms_fixed": alone["fixed"],
            "bandwidth_gb_s": bandwidth,
            "ms_per_token": ms["plain"] / NUM_TOKENS,
        },
        "draft": {
            name: {
                **floor(model),
                "step_ms": alone[name] / DRAFT_STEPS,
                "step_beside_ms": beside[name] / DRAFT_STEPS,
                "tree_ms": by_width(alone, f"{name} "),
                "tree_beside_ms": by_width(beside, f"{name} "),
            }
            for name, model in drafts.items()
        },
        "peer": {"hf_generate_ms_per_token": None if generate is None else (ms["all"] - ms["first"]) / NUM_TOKENS},
    }


def time_in_turns(
    work: Mapping[str, Work], neighbour: Neighbour | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """Median milliseconds of each piece of work, which waits for its device: alone, and while the neighbour works."""
    alone: dict[str, list[float]] = {name: [] for name in work}
    beside: dict[str, list[float]] = {name: [] for name in work}
    for number in range(WARM_UP_ROUNDS + NUM_ROUNDS):
        show_progress("rounds", number, WARM_UP_ROUNDS + NUM_ROUNDS)
        for times in (alone, beside) if neighbour is not None else (alone,):
            with neighbour.works() if times is beside and neighbour is not None else nullcontext():
                for name, run in work.items():
                    times[name].append(1000 * timeit.timeit(run, number=1))
    end_progress()
    medians = [
        {name: statistics.median(taken[WARM_UP_ROUNDS:]) for name, taken in times.items() if taken}
        for times in (alone, beside)
    ]
    return medians[0], medians[1]


def read_bandwidth(device: str) -> float:
    """GB/s (10^9 bytes) of a sequential read by torch's sum, best of seven: the floor of every pass."""
    values = torch.ones((2 << 30 if device.startswith("cuda") else 256 << 20) // 4, dtype=torch.float32, device=device)
    return 4 * values.numel() / min(timeit.repeat(lambda: values.sum().item(), repeat=7, number=1)) / 1e9


def load_transformers(path: str, dtype: str, device: str) -> Callable[[Sequence[int], int], object] | None:
    """Return `generate(prompt, number)`: exactly `number` greedy tokens by stock transformers; None on a full GPU."""
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), use_safetensors=True)
    try:
        model = model.to(device).eval()
    except torch.OutOfMemoryError:
        return None
    model.generation_config.eos_token_id = None  # or a run would be shorter than another

    def generate(prompt: Sequence[int], number: int) -> object:
        ids = torch.tensor([prompt], device=device)
        settings = {"max_new_tokens": number, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode(), quiet_transformers():
            return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, -1].item()

    return generate


def bench_text(document: dict[str, Any]) -> str:
    """The report as tables, each figure beside its floor or its peer."""
    target, peer_ms = document["target"], document["peer"]["hf_generate_ms_per_token"]
    floor = target["floor_ms"]
    figures = [
        (f"target, {width} rows", ms, target["beside_ms"][width], floor) for width, ms in target["forward_ms"].items()
    ]
    figures.append(("target, fixed width", target["forward_ms_fixed"], None, floor))
    for name, step in document["draft"].items():
        figures.append((f"draft step, {name}", step["step_ms"], step["step_beside_ms"], step["floor_ms"]))
        figures += [
            (f"draft step, {name}, tree, {width} rows", ms, step["tree_beside_ms"][width], step["floor_ms"])
            for width, ms in step["tree_ms"].items()
        ]
    passes = [
        (name, f"{ms:.2f}", "-" if beside is None else f"{beside:.2f}", f"{floor:.2f}", f"{ms / floor:.2f}")
        for name, ms, beside, floor in figures
    ]
    slower = statistics.median(beside / ms for _, ms, beside, _ in figures if beside is not None)
    plain = [("amusd", target["ms_per_token"])] + ([] if peer_ms is None else [("transformers.generate", peer_ms)])
    links = [
        (name, *(f"{link[figure]:.1f}" if figure in link else "-" for figure in ("one_way_us_p50", "one_way_us_p99")))
        for name, link in document["transport"].items()
    ]
    where = f"{target['context']} tokens of context; memory reads at {target['bandwidth_gb_s']:.1f} GB/s"
    parts = [
        f"{where}; forward pass: {target['implementation']}",
        table(("pass", "ms", "beside the other worker", "floor ms", "x floor"), passes),
        f"while the other worker computes, passes and steps take {slower:.2f} times as long",
        table(("plain decoding", "ms/token"), [(name, f"{ms:.2f}") for name, ms in plain]),
        table(("link", "one way us p50", "p99"), links),
    ]
    return "\n\n".join(parts)


def one_pass(model: CachedModel, prompt: Sequence[int], width: int) -> Work:
    """A pass of the first `width` tokens of `prompt` behind all of it."""
    return _behind(prompt, model, max(WIDTHS), lambda cache: model.run([Rows(prompt[:width], cache)])[0].choose())


def _steps(model: CachedModel, prompt: Sequence[int], number: int) -> Work:
    return _behind(prompt, model, number, lambda cache: extend(model, prompt[:1], cache, number))


def _tree_step(drafter: ModelDrafter, prompt: Sequence[int], width: int) -> Work:
    """A step of `width` nodes below the root."""

    def run() -> None:
        if drafter.committed != prompt:
            drafter.open(prompt, len(prompt) + 2, DecodingConfig().fan_out)
            drafter.step([drafter], [Expansion(root, [root])])
        nodes = [Node(root, token_id, len(prompt), 1.0, 1.0) for token_id in prompt[:width]]
        drafter.step([drafter], [Expansion(root, nodes)])
        drafter.follow(Transition((), (), (), 0))  # which frees their slots

    root = Node(None, prompt[-1], len(prompt) - 1, 1.0, 1.0)
    return run


def _behind(prompt: Sequence[int], model: CachedModel, room: int, work: Callable[[KVCache], object]) -> Work:
    cache = model.new_cache(len(prompt) + room)
    model.prefill(prompt, cache)

    def run() -> None:
        cache.truncate(len(prompt))
        work(cache)

    return run
