"""Times of prefills, passes, draft steps, token choices and plain decoding, beside floors and transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from amusd.commands.bench.peer import GeneratePeer, PeerContext
from amusd.commands.bench.timing import median_ratio, medians, time_in_turns
from amusd.config import BenchConfig, Distribution
from amusd.models.cached_model import CachedModel
from amusd.models.language_model import KVCache, argmax_rows
from amusd.models.numerics import Numerics
from amusd.sampling.sampler import TokenSampler

Progress: TypeAlias = Callable[[int, int], None]
Work: TypeAlias = Callable[[], object]

DRAFT_STEPS = 8
"""Draft steps in a row, as a chain makes them: only the first finds its weights displaced by the target's."""
MAX_CHOICE_ROWS = 8
"""Rows at most whose tokens are chosen at a time."""
RULES = {
    "matching": Distribution(temperature=1.0),
    "matching, top_k=50 top_p=0.9": Distribution(temperature=0.7, top_k=50, top_p=0.9),
    "matching, penalties": Distribution(temperature=0.7, repetition_penalty=1.1, presence_penalty=0.5),
}


def measure_passes(
    target: CachedModel,
    drafts: dict[str, CachedModel],
    prompt: Sequence[int],
    bench: BenchConfig,
    bandwidth_gb_s: float,
    progress: Progress,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `target` and `draft` parts of the report: milliseconds by width and by drafter, floors, ratios."""
    context, widest = len(prompt), max(bench.widths)
    bucketed = _bucketed(target, bench)
    cache = _filled(bucketed, prompt, room=widest)
    work = {str(width): _pass(bucketed, cache, prompt[:width], context) for width in bench.widths}
    work["fixed"] = _pass(target, _filled(target, prompt, room=widest), prompt[:1], context)
    for name, model in drafts.items():
        work[f"draft {name}"] = _draft_steps(model, _filled(model, prompt, room=DRAFT_STEPS), prompt[0], context)
    times = time_in_turns(work, bench.num_rounds, progress)
    typical = medians(times)
    floor_ms = target.weight_bytes / bandwidth_gb_s / 1e6
    narrow = str(min(bench.widths))
    of_target = {
        "implementation": target.implementation,
        "forward_ms": {str(width): typical[str(width)] for width in bench.widths},
        "forward_ms_fixed": typical["fixed"],
        "weight_bytes": target.weight_bytes,
        "bandwidth_gb_s": bandwidth_gb_s,
        "floor_ms": floor_ms,
        "ratio_to_floor": typical[narrow] / floor_ms,
        "ratio_to_narrowest": {str(width): median_ratio(times[str(width)], times[narrow]) for width in bench.widths},
        "context": context,
    }
    of_draft = {
        name: {
            "implementation": model.implementation,
            "step_ms": typical[f"draft {name}"] / DRAFT_STEPS,
            "weight_bytes": model.weight_bytes,
            "floor_ms": model.weight_bytes / bandwidth_gb_s / 1e6,
            "target_passes_per_step": median_ratio(times[f"draft {name}"], times["fixed"]) / DRAFT_STEPS,
            "tokens_per_step": model.tokens_per_step,
        }
        for name, model in drafts.items()
    }
    return of_target, of_draft


def measure_decoding(
    target: CachedModel, peer: GeneratePeer | None, prompt: Sequence[int], bench: BenchConfig, progress: Progress
) -> dict[str, Any]:
    """Plain decoding with and without a fixed width beside `transformers.generate`: time to first token, per token."""
    num_tokens = bench.num_tokens
    work: dict[str, Work] = {}
    for name, model in (("fixed", target), ("bucketed", _bucketed(target, bench))):
        cache = model.new_cache(len(prompt) + num_tokens + 1)
        work[f"{name} first"] = _decoding(model, cache, prompt, 1)
        work[f"{name} all"] = _decoding(model, cache, prompt, 1 + num_tokens)
    if peer is not None:
        work["peer first"] = _peer_decoding(peer, prompt, 1)
        work["peer all"] = _peer_decoding(peer, prompt, 1 + num_tokens)
    times = time_in_turns(work, bench.num_decoding_rounds, progress)
    typical = medians(times)
    per_token = {
        name: [
            (whole - first) / num_tokens
            for whole, first in zip(times[f"{name} all"], times[f"{name} first"], strict=True)
        ]
        for name in ("fixed", "bucketed", "peer")
        if f"{name} all" in times
    }
    result: dict[str, Any] = {
        "ms_per_token": medians(per_token),
        "time_to_first_token_ms": {name: typical[f"{name} first"] for name in per_token},
        "num_tokens": num_tokens,
    }
    if peer is not None:
        result["speedup_vs_peer"] = {
            name: median_ratio(per_token["peer"], per_token[name]) for name in ("fixed", "bucketed")
        }
    return result


def context_lengths(target: CachedModel, bench: BenchConfig) -> list[int]:
    """The lengths of `bench.contexts` that leave room for a pass, in order."""
    return [length for length in sorted(bench.contexts) if length + target.width <= target.max_length]


def measure_contexts(
    target: CachedModel, peer: GeneratePeer | None, prompt: Sequence[int], bench: BenchConfig, progress: Progress
) -> dict[str, Any]:
    """The `context` part of the report; each entry is keyed by the tokens of context.

    `prompt`: as many tokens as the longest context and a pass have. Transformers takes in the same tokens, and makes
    one step of one row behind them.
    """
    lengths = context_lengths(target, bench)
    work: dict[tuple[str, int], Work] = {}
    for length in lengths:
        cache = target.new_cache(length + target.width)
        rows = min(target.width, target.max_rows(length))
        work["prefill", length] = _prefill(target, cache, prompt[:length])
        work["pass", length] = _pass(target, cache, prompt[length : length + rows], length)
        if peer is not None:
            theirs = PeerContext(peer, prompt, length)
            work["peer prefill", length], work["peer step", length] = theirs.prefill, theirs.step
    times = time_in_turns(work, bench.num_context_rounds, progress, num_warm_up_rounds=1)  # a round is long
    typical = medians(times)

    def of_each(name: str) -> dict[str, float]:
        return {str(length): typical[name, length] for length in lengths}

    def ratios(name: str, other: Callable[[int], tuple[str, int]]) -> dict[str, float]:
        return {str(length): median_ratio(times[name, length], times[other(length)]) for length in lengths}

    result: dict[str, Any] = {
        "rows": target.width,
        "prefill_ms": of_each("prefill"),
        "pass_ms": of_each("pass"),
        "pass_ratio_to_shortest": ratios("pass", lambda _length: ("pass", lengths[0])),
    }
    if peer is not None:
        result |= {
            "peer_prefill_ms": of_each("peer prefill"),
            "peer_step_ms": of_each("peer step"),
            "prefill_ratio_to_peer": ratios("prefill", lambda length: ("peer prefill", length)),
        }
    return result


def measure_sampling(
    target: CachedModel, prompt: Sequence[int], bench: BenchConfig, pass_ms: float, progress: Progress
) -> dict[str, Any]:
    """Milliseconds for all rows of a pass of the target's logits, and the share of such a pass (`pass_ms`)."""
    rows = min(MAX_CHOICE_ROWS, max(bench.widths))
    bucketed = _bucketed(target, bench)
    cache = bucketed.new_cache(len(prompt) + rows)
    bucketed.prefill(prompt, cache)
    logits = bucketed.forward(prompt[:rows], cache).logits
    work: dict[str, Work] = {"argmax": partial(argmax_rows, logits)}
    for name, distribution in RULES.items():
        sampler = TokenSampler(distribution, target.vocab_size, target.output_ids, prompt=prompt)
        work[name] = partial(sampler.choose, logits, len(prompt), prompt[:rows])
    typical = medians(time_in_turns(work, bench.num_rounds, progress))
    return {
        "rows": rows,
        "pass_ms": pass_ms,
        "ms": typical,
        "share_of_pass": {name: (typical[name] - typical["argmax"]) / pass_ms for name in RULES},
    }


def _bucketed(target: CachedModel, bench: BenchConfig) -> CachedModel:
    """The target with passes padded to the next bucket of rows instead of a fixed width."""
    return target.under(Numerics.for_device(str(target.device), width=max(bench.widths), fixed=False))


def _filled(model: CachedModel, prompt: Sequence[int], room: int) -> KVCache:
    """A cache that holds `prompt`, prepared for passes behind it."""
    cache = model.new_cache(len(prompt) + room)
    model.prefill(prompt, cache)
    return cache


def _pass(model: CachedModel, cache: KVCache, token_ids: Sequence[int], context: int) -> Work:
    """One pass over the first `context` tokens of the cache."""

    def run() -> None:
        cache.truncate(context)
        model.forward(token_ids, cache).choose()

    return run


def _prefill(model: CachedModel, cache: KVCache, prompt: Sequence[int]) -> Work:
    def run() -> None:
        cache.truncate(0)
        model.prefill(prompt, cache)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    return run


def _draft_steps(model: CachedModel, cache: KVCache, token_id: int, context: int) -> Work:
    """A chain of draft steps behind the first `context` tokens of the cache."""

    def run() -> None:
        cache.truncate(context)
        model.extend([token_id], cache, DRAFT_STEPS)

    return run


def _decoding(model: CachedModel, cache: KVCache, prompt: Sequence[int], num_tokens: int) -> Work:
    """A prompt and the greedy tokens after it."""

    def run() -> None:
        cache.truncate(0)
        model.prefill(prompt[:-1], cache)
        token = prompt[-1]
        for _ in range(num_tokens):
            token = model.forward([token], cache).choose()[0]

    return run


def _peer_decoding(peer: GeneratePeer, prompt: Sequence[int], num_tokens: int) -> Work:
    def run() -> None:
        produced = len(peer.generate(prompt, num_tokens))
        if produced != num_tokens:
            raise RuntimeError(f"transformers.generate gave {produced} of {num_tokens} tokens: times would not compare")

    return run
