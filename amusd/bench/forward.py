"""Times of target passes, draft steps and plain decoding, each beside the floor that memory sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from amusd.bench.peer import GeneratePeer
from amusd.bench.timing import median_ratio, medians, time_in_turns
from amusd.config import BenchConfig
from amusd.models.cached_model import CachedModel
from amusd.models.language_model import KVCache
from amusd.models.numerics import Numerics

Progress = Callable[[int, int], None]

DRAFT_STEPS = 8
"""Draft steps in a row, as a chain makes them: only the first finds its weights displaced by the target's."""


@dataclass
class _Pass:
    """One pass over a context of fixed length, to be repeated."""

    model: CachedModel
    cache: KVCache
    token_ids: Sequence[int]
    context: int

    def __call__(self) -> None:
        self.cache.truncate(self.context)
        self.model.choose(self.token_ids, self.cache)


@dataclass
class _DraftSteps:
    """A chain of draft steps behind a context of fixed length."""

    model: CachedModel
    cache: KVCache
    token_id: int
    context: int

    def __call__(self) -> None:
        self.cache.truncate(self.context)
        self.model.extend([self.token_id], self.cache, DRAFT_STEPS)


def measure_passes(
    target: CachedModel,
    drafts: dict[str, CachedModel],
    prompt: Sequence[int],
    bench: BenchConfig,
    bandwidth_gb_s: float,
    progress: Progress,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `target` and `draft` parts of the report: milliseconds by width and by drafter, floors, ratios."""
    context, device = len(prompt), str(target.device)
    widest = max(bench.widths)
    bucketed = target.under(Numerics.for_device(device, width=widest, fixed=False))
    cache = _filled(bucketed, prompt, room=widest)
    work: dict[str, Callable[[], None]] = {
        str(width): _Pass(bucketed, cache, prompt[:width], context) for width in bench.widths
    }
    work["fixed"] = _Pass(target, _filled(target, prompt, room=widest), prompt[:1], context)
    for name, model in drafts.items():
        work[f"draft {name}"] = _DraftSteps(model, _filled(model, prompt, room=DRAFT_STEPS), prompt[0], context)
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
    bucketed = target.under(Numerics.for_device(str(target.device), width=max(bench.widths), fixed=False))
    work: dict[str, Callable[[], None]] = {}
    for name, model in (("fixed", target), ("bucketed", bucketed)):
        cache = model.new_cache(len(prompt) + num_tokens + 1)
        work[f"{name} first"] = _Decoding(model, cache, prompt, 1)
        work[f"{name} all"] = _Decoding(model, cache, prompt, 1 + num_tokens)
    if peer is not None:
        work["peer first"] = lambda: _generate(peer, prompt, 1)
        work["peer all"] = lambda: _generate(peer, prompt, 1 + num_tokens)
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


@dataclass
class _Decoding:
    """A prompt and the greedy tokens after it."""

    model: CachedModel
    cache: KVCache
    prompt: Sequence[int]
    num_tokens: int

    def __call__(self) -> None:
        self.cache.truncate(0)
        self.model.prefill(self.prompt[:-1], self.cache)
        token = self.prompt[-1]
        for _ in range(self.num_tokens):
            token = self.model.choose([token], self.cache)[0]


def _generate(peer: GeneratePeer, prompt: Sequence[int], num_tokens: int) -> None:
    produced = len(peer.generate(prompt, num_tokens))
    if produced != num_tokens:
        raise RuntimeError(f"transformers.generate gave {produced} of {num_tokens} tokens: times would not compare")


def _filled(model: CachedModel, prompt: Sequence[int], room: int) -> KVCache:
    """A cache that holds `prompt`, prepared for passes behind it."""
    cache = model.new_cache(len(prompt) + room)
    model.prefill(prompt, cache)
    return cache
