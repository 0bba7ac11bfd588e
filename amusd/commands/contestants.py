"""The ways to decode that `amusd compare` compares, and figures of their answers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from amusd.answer import Generation
from amusd.commands.tables import row_name, settings_of
from amusd.config import DecodingConfig, RunConfig
from amusd.engine import Engine
from amusd.models.passes import Rows
from amusd.runtime.devices import devices_of


@dataclass(eq=False)
class Contestant:
    """One way to decode, and its answers in the order of the prompts, which repeat if it needs more of them."""

    decoding: DecodingConfig
    drafter: str | None
    batch_size: int = 1
    num_devices: int = 1
    answers: list[Generation] = field(default_factory=list)
    seconds: float = 0.0
    """In which the answers were made."""

    @property
    def settings(self) -> dict[str, Any]:
        """What names it in a row."""
        return {**settings_of(self.decoding), "drafter": self.drafter, "batch_size": self.batch_size}

    @property
    def name(self) -> str:
        """The name for people."""
        return row_name(self.settings)


def contestants_of(config: RunConfig) -> list[Contestant]:
    """Plain decoding, then for each drafter the synchronous lengths and the asynchronous policies.

    `mode=synchronous` compares that mode with plain decoding, `mode=autoregressive` only measures it. Repeated for each
    batch size; plain decoding of one answer at a time comes first.
    """
    decoding, devices = config.decoding(), devices_of(config.engine_for("compare"))
    plain = replace(decoding, mode="autoregressive")
    found: list[tuple[DecodingConfig, str | None]] = [(plain, None)]
    for drafter in config.engine().drafters:
        has_trees = config.compare.trees and drafter.can.tree and config.sampling.rule != "rejection"
        found += [
            (replace(decoding, mode="synchronous", num_speculative_tokens=length, tree=is_tree), drafter.kind)
            for is_tree in dict.fromkeys((decoding.tree, *((False, True) if has_trees else ())))
            for length in config.synchronous_lengths()
        ]
        policies = config.asynchronous_policies() if drafter.can.runs_ahead else ()
        found += [(replace(decoding, policy=policy), drafter.kind) for policy in policies]
    sized = dict.fromkeys([(plain, None, 1), *((*one, size) for size in config.compare.batch_sizes for one in found)])
    return [Contestant(*one, num_devices=count_devices(devices if one[1] else devices[:-1])) for one in sized]


def count_devices(devices: Sequence[str]) -> int:
    """Number of devices: each GPU counts once, and a CPU for each rank (its cores)."""
    return len({*devices} - {"cpu"}) + devices.count("cpu")


def with_the_best(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Plain decoding, then for each drafter the best synchronous row and the asynchronous ones."""
    plain, *others = rows
    shown = [plain]
    for row in rows:
        if row["speedup_vs_autoregressive"] is None:
            row["speedup_vs_autoregressive"] = row["tokens_per_second"] / plain["tokens_per_second"]
    for drafter in dict.fromkeys(row["drafter"] for row in others):
        own = [row for row in others if row["drafter"] == drafter]
        synchronous = [row for row in own if row["mode"] == "synchronous"]
        chosen = [row for row in own if row["mode"] != "synchronous"]
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


def quartiles(values: Sequence[float]) -> list[float] | None:
    """The first and the third quartile; None for fewer than two values."""
    return statistics.quantiles(values, n=4, method="inclusive")[::2] if len(values) > 1 else None


def ms_per_token(answer: Generation) -> float:
    """The time of an answer, its prompt included."""
    return answer.metrics.total_ns / 1e6 / answer.metrics.num_tokens


def first_gap(engine: Engine, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int]) -> float:
    """Logit of the expected token less that of the found one, where two answers part; infinite if one only ends."""
    place = next((place for place, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return float("inf")
    prefix, model = (*prompt, *expected[:place]), engine.worker.model
    with engine.turns.alone():
        [cache] = model.new_caches(1, len(prefix))
        model.prefill(prefix[:-1], cache)
        logits = model.run([Rows(prefix[-1:], cache)])[0].logits[0]
    return float(logits[expected[place]]) - float(logits[found[place]])
