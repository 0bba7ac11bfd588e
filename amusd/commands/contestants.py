"""The ways to decode that `amusd compare` compares, their answers, and the rows of the result."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from amusd.answer import Generation
from amusd.config import DecodingConfig, RunConfig
from amusd.engine import Engine
from amusd.models.passes import Rows
from amusd.policies.factory import policy_name
from amusd.runtime.devices import devices_of
from amusd.tracing.metrics import total
from amusd.types import Mode
from amusd.workload import WorkloadPrompt


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to decode."""

    decoding: DecodingConfig
    drafter: str | None
    batch_size: int = 1
    num_devices: int = 1

    @property
    def length(self) -> int | None:
        """Tokens of a block or window; None where there are no blocks."""
        in_blocks = self.decoding.mode is Mode.SYNCHRONOUS or policy_name(self.decoding) == "windowed"
        return self.decoding.num_speculative_tokens if in_blocks else None

    @property
    def name(self) -> str:
        """The name for people."""
        length, is_block = self.decoding.num_speculative_tokens, self.decoding.mode is Mode.SYNCHRONOUS
        block = f"tree of {length} steps" if self.decoding.tree else f"{length} tokens"
        parts = (
            self.decoding.mode.value,
            block if is_block else policy_name(self.decoding),
            self.drafter,
            f"{self.batch_size} at a time" if self.batch_size > 1 else None,
        )
        return ", ".join(part for part in parts if part is not None)


@dataclass
class Comparison:
    """The answers of all contestants. `answers[c][p]` belongs to contestant c and prompt p.

    Loads with more places than prompts repeat the prompts.
    """

    contestants: list[Contestant]
    prompts: list[WorkloadPrompt] = field(default_factory=list)
    encoded: list[tuple[int, ...]] = field(default_factory=list)
    answers: list[list[Generation]] = field(default_factory=list)
    seconds: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of each contestant's answers, by its index."""
    refused: list[tuple[int, str]] = field(default_factory=list)
    repeatable: bool = True
    """Every mode should give the same answers."""

    @classmethod
    def of(cls, config: RunConfig) -> Comparison:
        """The contestants that `config` asks for, without measurements."""
        contestants = contestants_of(config)
        repeatable = config.sampling.rule != "rejection"
        return cls(contestants, answers=[[] for _ in contestants], repeatable=repeatable)


def contestants_of(config: RunConfig) -> list[Contestant]:
    """Plain decoding, then for each drafter the synchronous lengths and the asynchronous policy.

    `mode=synchronous` compares that mode with plain decoding, `mode=autoregressive` only measures it. Repeated for each
    batch size; plain decoding of one answer at a time comes first.
    """
    decoding, devices = config.decoding(), devices_of(config.engine_for("compare"))

    def one(drafter: str | None, **changes: Any) -> Contestant:
        occupied = devices if drafter is not None else devices[:-1]
        return Contestant(replace(decoding, **changes), drafter, num_devices=count_devices(occupied))

    plain = one(None, mode=Mode.AUTOREGRESSIVE)
    found = [plain]
    for drafter in config.engine().drafters:
        has_trees = config.compare.trees and drafter.can.tree and config.sampling.rule != "rejection"
        found += [
            one(drafter.kind, mode=Mode.SYNCHRONOUS, num_speculative_tokens=length, tree=is_tree)
            for is_tree in dict.fromkeys((decoding.tree, *((False, True) if has_trees else ())))
            for length in config.synchronous_lengths()
        ]
        policies = config.asynchronous_policies() if drafter.can.runs_ahead else ()
        found += [one(drafter.kind, policy=policy) for policy in policies]
    sizes = config.compare.batch_sizes
    return list(dict.fromkeys([plain, *(replace(each, batch_size=size) for size in sizes for each in found)]))


def count_devices(devices: Sequence[str]) -> int:
    """Number of devices: each GPU counts once, and a CPU for each rank (its cores)."""
    return len({*devices} - {"cpu"}) + devices.count("cpu")


def rows_of(comparison: Comparison, engine: Engine) -> list[dict[str, Any]]:
    """The documented rows of what is measured, by batch size."""
    shown: list[dict[str, Any]] = []
    for size in dict.fromkeys(contestant.batch_size for contestant in comparison.contestants):
        indices = [i for i, contestant in enumerate(comparison.contestants) if contestant.batch_size == size]
        if all(comparison.answers[index] for index in indices):
            shown += _shown([_row(comparison, index, engine) for index in indices])
    return shown


def _shown(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    plain, *others = rows
    shown = [plain]
    for row in rows:
        if row["speedup_vs_autoregressive"] is None:
            row["speedup_vs_autoregressive"] = row["tokens_per_second"] / plain["tokens_per_second"]
    for drafter in dict.fromkeys(row["drafter"] for row in others):
        own = [row for row in others if row["drafter"] == drafter]
        synchronous = [row for row in own if row["mode"] == Mode.SYNCHRONOUS.value]
        chosen = [row for row in own if row["mode"] != Mode.SYNCHRONOUS.value]
        if synchronous:
            best = max(synchronous, key=lambda row: float(row["tokens_per_second"]))
            best["tuned"] = {
                f"{row['num_speculative_tokens']}{' as a tree' if row['tree'] else ''}": row["tokens_per_second"]
                for row in synchronous
            }
            chosen.insert(0, best)
            for row in chosen:
                row["speedup_vs_best_synchronous"] = row["tokens_per_second"] / best["tokens_per_second"]
        shown += chosen
    return shown


def per_prompt(comparison: Comparison) -> list[dict[str, Any]]:
    """The time per token of every contestant, for each answered prompt, all synchronous lengths included."""
    return [
        {
            "number": prompt.number,
            "category": prompt.category,
            "ms_per_token": {
                contestant.name: _ms_per_token(answers[position])
                for contestant, answers in zip(comparison.contestants, comparison.answers, strict=True)
                if position < len(answers)
            },
        }
        for position, prompt in enumerate(comparison.prompts)
    ]


def records_of(comparison: Comparison) -> list[dict[str, Any]]:
    """Every answer, prompt by prompt, as `files.py` keeps them."""
    number = len(comparison.prompts)
    return [
        _record(comparison, index, place)
        for position in range(number)
        for index, answers in enumerate(comparison.answers)
        for place in range(position, len(answers), number)
    ]


def _record(comparison: Comparison, index: int, place: int) -> dict[str, Any]:
    contestant, answer = comparison.contestants[index], comparison.answers[index][place]
    repeat, position = divmod(place, len(comparison.prompts))
    return {
        "prompt": comparison.prompts[position].number,
        "mode": contestant.decoding.mode.value,
        "policy": policy_name(contestant.decoding),
        "drafter": contestant.drafter,
        "length": contestant.length,
        "batch_size": contestant.batch_size,
        "repeat": repeat + 1,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason.value,
        "tokens": answer.metrics.num_tokens,
        "ms": answer.metrics.total_ns / 1e6,
        "accepted": answer.metrics.num_accepted,
        # Under the ratio test only the law is the same, not the answer.
        "identical": answer.token_ids == comparison.answers[0][position].token_ids if comparison.repeatable else None,
    }


def _row(comparison: Comparison, index: int, engine: Engine) -> dict[str, Any]:
    contestant, answers = comparison.contestants[index], comparison.answers[index]
    decoding, is_alone = contestant.decoding, contestant.batch_size == 1
    metrics = total([answer.metrics for answer in answers]).as_dict()
    if not is_alone:
        metrics["tokens_per_second"] = metrics["num_tokens"] / comparison.seconds[index]
        # the counts of one answer do not say what its batch mates had the workers do
        metrics |= dict.fromkeys(("target_idle_fraction", "target_wait_fraction", "draft_idle_fraction"))
    ratios = [
        _ms_per_token(reference) / _ms_per_token(answer)
        for reference, answer in zip(comparison.answers[0], answers if is_alone else (), strict=is_alone)
    ]
    is_synchronous = decoding.mode is Mode.SYNCHRONOUS
    return {
        "contestant": contestant.name,
        "mode": decoding.mode.value,
        "policy": policy_name(decoding),
        "drafter": contestant.drafter,
        "num_speculative_tokens": decoding.num_speculative_tokens if is_synchronous else None,
        "tree": is_synchronous and decoding.tree,
        "batch_size": contestant.batch_size,
        "p50_inter_token_ms": metrics["median_inter_token_latency_ms"],
        "p99_inter_token_ms": metrics["p99_inter_token_latency_ms"],
        "num_prompts": len(answers),
        **metrics,
        "speedup_vs_autoregressive": statistics.median(ratios) if is_alone else None,
        "speedup_quartiles": _quartiles(ratios) if index else None,
        "speedup_vs_best_synchronous": None,
        "num_devices": contestant.num_devices,
        "tokens_per_second_per_device": metrics["tokens_per_second"] / contestant.num_devices,
        "sequence_ids": [answer.sequence_id for answer in answers],
        # Under the ratio test only the law is the same, not the answer.
        "identical_to_autoregressive": _identity(comparison, index, engine) if comparison.repeatable else None,
    }


def _quartiles(values: Sequence[float]) -> list[float] | None:
    """The first and the third; None of a single value, which has no spread."""
    if len(values) < 2:
        return None
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def _ms_per_token(answer: Generation) -> float:
    return answer.metrics.total_ns / 1e6 / answer.metrics.num_tokens


def _identity(comparison: Comparison, index: int, engine: Engine) -> dict[str, Any]:
    gaps: list[float] = []
    answers = comparison.answers[index]
    pairs_of = zip(itertools.cycle(comparison.encoded), itertools.cycle(comparison.answers[0]), answers)
    for prompt, reference, answer in pairs_of:
        if reference.token_ids == answer.token_ids:
            continue
        pairs = zip(reference.token_ids, answer.token_ids, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:  # one is a prefix of the other: no tie could explain that
            gaps.append(float("inf"))
            continue
        prefix = (*prompt, *reference.token_ids[:first])
        gaps.append(_logit_gap(engine, prefix, reference.token_ids[first], answer.token_ids[first]))
    return {"num_prompts": len(answers), "num_identical": len(answers) - len(gaps), "first_difference_gaps": gaps}


def _logit_gap(engine: Engine, prefix: Sequence[int], token_id: int, other_id: int) -> float:
    model = engine.worker.model
    with engine.turns.alone():
        [cache] = model.new_caches(1, len(prefix))
        model.prefill(prefix[:-1], cache)
        logits = model.run([Rows(prefix[-1:], cache)])[0].logits[0]
    return float(logits[token_id]) - float(logits[other_id])
