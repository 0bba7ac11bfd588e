"""`amusd bench`: times of passes, draft steps and messages, with floors and the speed of transformers.

Pieces of work take turns, so that a change in the machine's speed affects all alike. Passes and draft steps are timed
alone, and while the other worker's device computes. Times are medians.
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any, NamedTuple, TypeAlias

import torch

from amusd.checkpoints.checkpoint import find_checkpoint
from amusd.checkpoints.loading import describe_drafter, load_draft_model, load_target, model_path, target_dtype
from amusd.checkpoints.tokenizer import Tokenizer
from amusd.checkpoints.transformers_models import quiet_transformers
from amusd.commands.job import Job
from amusd.commands.other_worker import LONG, Surrounding, measure_one_way, neighbour
from amusd.config import DecodingConfig, EngineConfig, HardwareConfig, TransportConfig
from amusd.console import table
from amusd.drafters.base import Expansion
from amusd.drafters.model import ModelDrafter
from amusd.drafters.ngram import NgramCache
from amusd.errors import ConfigError, PeerLostError
from amusd.files import read_json
from amusd.logs import end_progress, logger, show_progress
from amusd.models.kv_cache import KVCache
from amusd.models.numerics import Numerics
from amusd.models.passes import Rows
from amusd.protocol.draft_tree import Node, Transition
from amusd.runner.model_runner import ModelRunner, extend
from amusd.runtime.cores import allowed_cores, cores_for, pin_to
from amusd.runtime.devices import claim_device, device_of, free_bytes, warn_of_sharing, with_devices
from amusd.transport.factory import ON_ONE_MACHINE

CONTEXT_LENGTH = 200
WIDTHS = (1, 4, 8, 16)
NUM_ROUNDS = 9
NUM_MESSAGES = 2000
WARM_UP_ROUNDS = 2
DRAFT_STEPS = 8
"""Steps timed in a row, as in a chain: only the first begins with the target's weights in the CPU's cache."""
NUM_TOKENS = 24
TEXT = "The harbour master keeps a notebook in which he writes down every ship that enters, and the weather. "

Drafts: TypeAlias = Mapping[str, ModelRunner]
Generate: TypeAlias = Callable[[Sequence[int], int], object]
"""`generate(prompt, number)`: decode `number` tokens by transformers."""
_LINK_FIGURES = ("one_way_us_p50", "one_way_us_p99")


class Work(NamedTuple):
    """A piece of work to time."""

    run: Callable[[], object]
    weight_bytes: int
    """Bytes of the weights, which each step reads at least once."""
    num_steps: int = 1


def run(job: Job) -> int:
    """Measure links, then models, and show the result; return the exit code.

    The caller has set the number of threads. Raises `ConfigError`, but not for a link.
    """
    engine = job.config.engine(max_num_seqs=1)
    warn_of_sharing(engine)
    engine = replace(engine, hardware=with_devices(engine))
    logger.info("messages over each link")
    transport = dict(measure_links(ON_ONE_MACHINE, engine.hardware, NUM_MESSAGES))
    device, draft_device = claim_device(engine, "target"), device_of(engine, "draft")
    drafts: dict[str, ModelRunner] = {}
    with beside(engine) as busy:
        for drafter in (drafter for drafter in engine.drafters if drafter.can.has_model):
            model, _ = load_draft_model(drafter, engine, draft_device)
            assert isinstance(model, ModelRunner)
            drafts[drafter.kind] = model
            logger.info(f"draft: {describe_drafter(drafter, engine, draft_device)}")
        target, tokenizer = load_target(engine, device)
        generate = None
        if engine.hardware.synthetic is None:  # random weights have no checkpoint
            path = str(find_checkpoint(model_path(engine.target)))
            generate = load_transformers(path, target_dtype(engine, device), device)
            if generate is None:
                logger.info(f"transformers is left out: {device} has no room for its copy of the target beside ours")
        prompt = context_of(tokenizer, [target, *drafts.values()])
        result, report = measure_models(target, drafts, generate, prompt, busy)
    result |= {"transport": transport, "complete": True}
    result["environment"] = read_json(job.folder / "environment.json")
    links = [
        (name, *(f"{link[figure]:.1f}" if figure in link else "-" for figure in _LINK_FIGURES))
        for name, link in transport.items()
    ]
    return job.conclude(result, "\n\n".join([*report, table(("link", "one way us p50", "p99"), links)]))


def context_of(tokenizer: Tokenizer, models: Iterable[ModelRunner]) -> list[int]:
    """Token ids of the context: `CONTEXT_LENGTH`, or fewer if a model lacks room. Raises `ConfigError`."""
    length = min(CONTEXT_LENGTH, *(model.max_length - NUM_TOKENS for model in models))
    if length < max(WIDTHS):
        raise ConfigError(f"max_model_len: `amusd bench` needs room for {max(WIDTHS) + NUM_TOKENS} tokens")
    return (tokenizer.encode(TEXT) * length)[:length]


@contextmanager
def beside(engine: EngineConfig) -> Iterator[Surrounding]:
    """Yield `busy` of a `neighbour` in place of the draft. On CPUs, pin this process to the target's cores."""
    allowed = allowed_cores()
    if device_of(engine, "target") == "cpu":
        pin_to(cores_for("target", allowed, engine.hardware))
    with neighbour(device_of(engine, "draft"), cores_for("draft", allowed, engine.hardware)) as busy:
        yield busy
    pin_to(set(allowed))


def measure_links(
    links: Mapping[Any, TransportConfig], hardware: HardwareConfig, num_messages: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each link's name and one-way times, or why the link does not work here (`unavailable`)."""
    allowed = allowed_cores()
    measure = partial(measure_one_way, num_messages=num_messages, cores=cores_for("draft", allowed, hardware))
    pin_to(cores_for("target", allowed, hardware))
    for name, link in links.items():
        try:
            taken = dict(zip(_LINK_FIGURES, measure(link), strict=True))
            if link.kind == "nccl":  # short messages go by gloo
                taken["long_one_way_us_p50"] = measure(link, message=LONG)[0]
            yield name, taken
        except (ConfigError, PeerLostError) as error:  # noqa: PERF203 - a link takes seconds
            yield name, {"unavailable": str(error)}
    pin_to(set(allowed))


def measure_models(
    target: ModelRunner, drafts: Drafts, generate: Generate | None, prompt: Sequence[int], busy: Surrounding
) -> tuple[dict[str, Any], list[str]]:
    """Figures of passes, draft steps and plain decoding, and the parts of a report about these figures."""
    bandwidth, work = read_bandwidth(str(target.device)), dict(_passes_and_steps(target, drafts, prompt))
    alone, slowed = time_in_turns(work, nullcontext, busy)
    plain = time_plain_decoding(target, generate, prompt)

    def figures_of(model: ModelRunner) -> dict[str, Any]:
        return {"weight_bytes": model.weight_bytes, "floor_ms": model.weight_bytes / bandwidth / 1e6}

    figures = {
        "target": {
            **figures_of(target),
            "implementation": target.implementation,
            "context": len(prompt),
            "forward_ms": _by_width(alone, "target"),
            "beside_ms": _by_width(slowed, "target"),
            "forward_ms_fixed": alone["target, fixed width"],
            "bandwidth_gb_s": bandwidth,
            "ms_per_token": plain["amusd"],
        },
        "draft": {
            name: {
                **figures_of(model),
                "step_ms": alone[f"draft step, {name}"],
                "step_beside_ms": slowed[f"draft step, {name}"],
                "tree_ms": _by_width(alone, f"draft step, {name}, tree"),
                "tree_beside_ms": _by_width(slowed, f"draft step, {name}, tree"),
            }
            for name, model in drafts.items()
        },
        "peer": {"hf_generate_ms_per_token": plain.get("transformers.generate")},
    }
    where = f"{len(prompt)} tokens of context; memory reads at {bandwidth:.1f} GB/s"
    return figures, [
        f"{where}; forward pass: {target.implementation}",
        *passes_text(work, alone, slowed, bandwidth),
        table(("plain decoding", "ms/token"), [(name, f"{ms:.2f}") for name, ms in plain.items()]),
    ]


def _by_width(ms: Mapping[str, float], name: str) -> dict[str, float]:
    return {str(width): ms[key] for width in WIDTHS if (key := f"{name}, {width} rows") in ms}


def _passes_and_steps(target: ModelRunner, drafts: Drafts, prompt: Sequence[int]) -> Iterator[tuple[str, Work]]:
    rule = Numerics.for_device(str(target.device), width=max(WIDTHS), fixed=False)
    bucketed = replace(target, options=replace(target.options, numerics=rule))
    yield from ((f"target, {width} rows", one_pass(bucketed, prompt, width)) for width in WIDTHS)
    yield "target, fixed width", one_pass(target, prompt, 1)
    for name, model in drafts.items():
        yield f"draft step, {name}", _steps(model, prompt, DRAFT_STEPS)
        drafter = ModelDrafter(model, NgramCache())
        for width in () if model.network.is_recurrent else WIDTHS:  # recurrent layers draft chains alone
            yield f"draft step, {name}, tree, {width} rows", _tree_step(drafter, prompt, width)


def time_plain_decoding(target: ModelRunner, generate: Generate | None, prompt: Sequence[int]) -> dict[str, float]:
    """Milliseconds per token of this package and of transformers, without the prompt."""
    work = {"amusd": _steps(target, prompt, NUM_TOKENS)}
    if generate is None:
        return time_in_turns(work, nullcontext)[0]
    for name, number in (("first", 1), ("all", 1 + NUM_TOKENS)):
        work[name] = Work(partial(generate, prompt, number), target.weight_bytes)
    [ms] = time_in_turns(work, nullcontext)
    return {"amusd": ms["amusd"], "transformers.generate": (ms["all"] - ms["first"]) / NUM_TOKENS}


def passes_text(
    work: Mapping[str, Work], alone: Mapping[str, float], slowed: Mapping[str, float], bandwidth: float
) -> tuple[str, str]:
    """A table of milliseconds beside their floors, and a line about the slow-down by the other worker."""
    lines = []
    for name, ms in alone.items():
        floor = work[name].weight_bytes / bandwidth / 1e6
        lines.append((name, *(f"{figure:.2f}" for figure in (ms, slowed[name], floor, ms / floor))))
    factor = statistics.median(slowed[name] / ms for name, ms in alone.items())
    return (
        table(("pass", "ms", "beside the other worker", "floor ms", "x floor"), lines),
        f"while the other worker computes, passes and steps take {factor:.2f} times as long",
    )


def time_in_turns(work: Mapping[str, Work], *surroundings: Surrounding) -> list[dict[str, float]]:
    """Median milliseconds of each piece of work in each surrounding. Each `run` must wait for its device."""
    taken = [{name: list[float]() for name in work} for _ in surroundings]
    for number in range(WARM_UP_ROUNDS + NUM_ROUNDS):
        show_progress("rounds", number, WARM_UP_ROUNDS + NUM_ROUNDS)
        for times, surround in zip(taken, surroundings, strict=True):
            with surround():
                for name, own in work.items():
                    times[name].append(1000 * timeit.timeit(own.run, number=1) / own.num_steps)
    end_progress()
    return [{name: statistics.median(own[WARM_UP_ROUNDS:]) for name, own in times.items()} for times in taken]


def read_bandwidth(device: str) -> float:
    """Memory bandwidth in GB/s (10^9 bytes), for floors: the best of seven sums by torch."""
    size = min(2 << 30 if device.startswith("cuda") else 256 << 20, free_bytes(device) // 2)
    values = torch.ones(size // 4, dtype=torch.float32, device=device)
    return 4 * values.numel() / min(timeit.repeat(lambda: values.sum().item(), repeat=7, number=1)) / 1e9


def load_transformers(path: str, dtype: str, device: str) -> Generate | None:
    """Return `generate(prompt, number)`: exactly `number` greedy tokens by stock transformers; None on a full GPU."""
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), use_safetensors=True)
    try:
        model = model.to(device).eval()
    except torch.OutOfMemoryError:
        return None
    model.generation_config.eos_token_id = None  # so that all runs have one length

    def generate(prompt: Sequence[int], number: int) -> object:
        ids = torch.tensor([prompt], device=device)
        settings = {"max_new_tokens": number, "do_sample": False, "pad_token_id": 0}
        with torch.inference_mode(), quiet_transformers():
            return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, -1].item()

    return generate


def one_pass(model: ModelRunner, prompt: Sequence[int], width: int) -> Work:
    """A pass of `width` rows after the prompt, or of the most rows allowed there."""
    tokens = [*islice(cycle(prompt), min(width, model.numerics.max_rows(len(prompt))))]
    return _after(prompt, model, width, lambda cache: model.run([Rows(tokens, cache)])[0].choose())


def _steps(model: ModelRunner, prompt: Sequence[int], number: int) -> Work:
    work = _after(prompt, model, number, lambda cache: extend(model, prompt[:1], cache, number))
    return work._replace(num_steps=number)


def _tree_step(drafter: ModelDrafter, prompt: Sequence[int], width: int) -> Work:
    """A draft step over `width` nodes below the root."""

    def run() -> None:
        if drafter.committed != prompt:
            drafter.open(prompt, len(prompt) + 2, DecodingConfig().fan_out)
            drafter.step([drafter], [Expansion(root, [root])])
        nodes = [Node(root, token_id, len(prompt), 1.0, 1.0) for token_id in prompt[:width]]
        drafter.step([drafter], [Expansion(root, nodes)])
        drafter.follow(Transition((), (), (), 0))  # frees the nodes' slots

    root = Node(None, prompt[-1], len(prompt) - 1, 1.0, 1.0)
    return Work(run, drafter.model.weight_bytes)


def _after(prompt: Sequence[int], model: ModelRunner, room: int, work: Callable[[KVCache], object]) -> Work:
    cache = model.new_cache(len(prompt) + room)
    model.prefill(prompt, cache)

    def run() -> None:
        cache.truncate(len(prompt))
        work(cache)

    return Work(run, model.weight_bytes)
