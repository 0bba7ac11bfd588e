"""What choosing tokens from logits costs, beside the pass that makes the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from amusd.bench.timing import medians, time_in_turns
from amusd.config import BenchConfig, Distribution
from amusd.models.cached_model import CachedModel
from amusd.models.language_model import argmax_rows
from amusd.models.numerics import Numerics
from amusd.sampling.sampler import TokenSampler

RULES = {
    "matching": Distribution(temperature=1.0),
    "matching, top_k=50 top_p=0.9": Distribution(temperature=0.7, top_k=50, top_p=0.9),
    "matching, penalties": Distribution(temperature=0.7, repetition_penalty=1.1, presence_penalty=0.5),
}


def measure_sampling(
    target: CachedModel, prompt: Sequence[int], bench: BenchConfig, pass_ms: float, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Milliseconds for all rows of a pass of the target's logits, and the share of such a pass (`pass_ms`)."""
    widest = max(bench.widths)
    rows = min(8, widest)
    bucketed = target.under(Numerics.for_device(str(target.device), width=widest, fixed=False))
    cache = bucketed.new_cache(len(prompt) + rows)
    bucketed.prefill(prompt, cache)
    logits = bucketed.forward(prompt[:rows], cache).logits
    work: dict[str, Callable[[], None]] = {"argmax": lambda: _argmax(logits)}
    for name, distribution in RULES.items():
        sampler = TokenSampler(distribution, target.vocab_size, target.output_ids, prompt=prompt)
        work[name] = _choice(sampler, logits, prompt, rows)
    typical = medians(time_in_turns(work, bench.num_rounds, progress))
    return {
        "rows": rows,
        "pass_ms": pass_ms,
        "ms": typical,
        "share_of_pass": {name: (typical[name] - typical["argmax"]) / pass_ms for name in RULES},
    }


def _argmax(logits: Tensor) -> None:
    argmax_rows(logits)


def _choice(sampler: TokenSampler, logits: Tensor, prompt: Sequence[int], rows: int) -> Callable[[], None]:
    def run() -> None:
        sampler.choose(logits, len(prompt), prompt[:rows])

    return run
