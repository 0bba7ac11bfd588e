"""The ways to decode that `amusd compare` compares, and the rows of the result."""

from __future__ import annotations

import itertools
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
from amusd.tracing.metrics import total
from amusd.types import Mode
from amusd.workload import WorkloadPrompt


@dataclass(eq=False)
class Contestant:
    """One way to decode, and its answers to the prompts in order, over and over if it needs more of them."""

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
        """The name for people, and in `per_prompt`."""
        return row_name(self.settings)


def contestants_of(config: RunConfig) -> list[Contestant]:
    """Plain decoding, then for each drafter the synchronous lengths and the asynchronous policies.

    `mode=synchronous` compares that mode with plain decoding, `mode=autoregressive` only measures it. Repeated for each
    batch size; plain decoding of one answer at a time comes first.
    """
    decoding, devices = config.decoding(), devices_of(config.engine_for("compare"))
    plain = replace(decoding, mode=Mode.AUTOREGRESSIVE)
    found: list[tuple[DecodingConfig, str | None]] = [(plain, None)]
    for drafter in config.engine().drafters:
        has_trees = config.compare.trees and drafter.can.tree and config.sampling.rule != "rejection"
        found += [
            (replace(decoding, mode=Mode.SYNCHRONOUS, num_speculative_tokens=length, tree=is_tree), drafter.kind)
            for is_tree in dict.fromkeys((decoding.tree, *((False, True) if has_trees else ())))
            for length in config.synchronous_lengths()
        ]
        policies = config.asynchronous_policies() if drafter.can.runs_ahead else ()
        found += [(replace(decoding, policy=policy), drafter.kind) for policy in policies]
    sized = [(plain, None, 1), *((*each, size) for size in config.compare.batch_sizes for each in found)]
    return [
        Contestant(*each, num_devices=count_devices(devices if each[1] else devices[:-1]))
        for each in dict.fromkeys(sized)
    ]


def count_devices(devices: Sequence[str]) -> int:
    """Number of devices: each GPU counts once, and a CPU for each rank (its cores)."""
    return len({*devices} - {"cpu"}) + devices.count("cpu")


@dataclass
class Comparison:
    """The contestants and what they were asked."""

    contestants: list[Contestant]
    repeatable: bool = True
    """Every mode should give the same answers. Under the ratio test only their law is the same."""
    prompts: list[WorkloadPrompt] = field(default_factory=list)
    encoded: list[tuple[int, ...]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def plain(self) -> Contestant:
        """Plain decoding of one answer at a time."""
        return self.contestants[0]

    def records(self) -> list[dict[str, Any]]:
        """Every answer, prompt by prompt, as `answers.jsonl` has it."""
        number = len(self.prompts)
        return [
            {
                "prompt": prompt.number,
                **contestant.settings,
                "text": answer.text,
                "token_ids": list(answer.token_ids),
                "finish_reason": answer.finish_reason.value,
                "tokens": answer.metrics.num_tokens,
                "ms": answer.metrics.total_ns / 1e6,
                "accepted": answer.metrics.num_accepted,
                "identical": answer.token_ids == self.plain.answers[place].token_ids if self.repeatable else None,
            }
            for place, prompt in enumerate(self.prompts)
            for contestant in self.contestants
            for answer in contestant.answers[place::number]
        ]

    def per_prompt(self) -> list[dict[str, Any]]:
        """The time per token of every contestant, for each answered prompt, all synchronous lengths included."""
        return [
            {
                "number": prompt.number,
                "category": prompt.category,
                "ms_per_token": {
                    contestant.name: _ms_per_token(contestant.answers[place])
                    for contestant in self.contestants
                    if place < len(contestant.answers)
                },
            }
            for place, prompt in enumerate(self.prompts)
        ]

    def rows(self, engine: Engine) -> list[dict[str, Any]]:
        """The documented rows of what is measured, by batch size."""
        shown: list[dict[str, Any]] = []
        for size in dict.fromkeys(contestant.batch_size for contestant in self.contestants):
            own = [contestant for contestant in self.contestants if contestant.batch_size == size]
            if all(contestant.answers for contestant in own):
                shown += _shown([self._row(contestant, engine) for contestant in own])
        return shown

    def _row(self, contestant: Contestant, engine: Engine) -> dict[str, Any]:
        answers, is_alone = contestant.answers, contestant.batch_size == 1
        figures = total([answer.metrics for answer in answers]).as_dict()
        ratios = []
        if is_alone:
            pairs = zip(self.plain.answers, answers, strict=True)
            ratios = [_ms_per_token(plain) / _ms_per_token(answer) for plain, answer in pairs]
        else:
            figures["tokens_per_second"] = figures["num_tokens"] / contestant.seconds
            # the counts of one answer do not say what its batch mates had the workers do
            figures |= dict.fromkeys(("target_idle_fraction", "target_wait_fraction", "draft_idle_fraction"))
        return {
            "contestant": contestant.name,
            **contestant.settings,
            "p50_inter_token_ms": figures["median_inter_token_latency_ms"],
            "p99_inter_token_ms": figures["p99_inter_token_latency_ms"],
            "num_prompts": len(answers),
            **figures,
            "speedup_vs_autoregressive": statistics.median(ratios) if is_alone else None,
            "speedup_quartiles": _quartiles(ratios) if contestant is not self.plain else None,
            "speedup_vs_best_synchronous": None,
            "num_devices": contestant.num_devices,
            "tokens_per_second_per_device": figures["tokens_per_second"] / contestant.num_devices,
            "sequence_ids": [answer.sequence_id for answer in answers],
            "identical_to_autoregressive": self._identity(contestant, engine) if self.repeatable else None,
        }

    def _identity(self, contestant: Contestant, engine: Engine) -> dict[str, Any]:
        gaps = [
            _first_gap(engine, prompt, plain.token_ids, answer.token_ids)
            for prompt, plain, answer in zip(
                itertools.cycle(self.encoded), itertools.cycle(self.plain.answers), contestant.answers, strict=False
            )
            if plain.token_ids != answer.token_ids
        ]
        number = len(contestant.answers)
        return {"num_prompts": number, "num_identical": number - len(gaps), "first_difference_gaps": gaps}


def _shown(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Plain decoding, then for each drafter the best synchronous row and the asynchronous ones."""
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


def _quartiles(values: Sequence[float]) -> list[float] | None:
    """The first and the third; None of a single value, which has no spread."""
    return statistics.quantiles(values, n=4, method="inclusive")[::2] if len(values) > 1 else None


def _ms_per_token(answer: Generation) -> float:
    return answer.metrics.total_ns / 1e6 / answer.metrics.num_tokens


def _first_gap(engine: Engine, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int]) -> float:
    """By how much the target prefers its own token where two answers part; infinite if one goes on where one ends."""
    place = next((place for place, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return float("inf")
    prefix, model = (*prompt, *expected[:place]), engine.worker.model
    with engine.turns.alone():
        [cache] = model.new_caches(1, len(prefix))
        model.prefill(prefix[:-1], cache)
        logits = model.run([Rows(prefix[-1:], cache)])[0].logits[0]
    return float(logits[expected[place]]) - float(logits[found[place]])
