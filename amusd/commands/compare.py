"""Plain, synchronous and asynchronous decoding on the same prompts, models and devices, in one run.

Contestants take turns prompt by prompt (and in rotating order), so that a machine whose speed drifts treats them alike.
A synchronous row is tuned: every length of `compare.synchronous_lengths` runs, the table shows the fastest. Where a
draft is lost, the next one is waited for before anything else is measured.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from amusd.answer import Generation
from amusd.commands.generate import Done
from amusd.config import DecodingConfig, RunConfig
from amusd.console import Console, percent, table
from amusd.engine import Engine
from amusd.errors import ConfigError
from amusd.files import read_json, write_json, write_whole
from amusd.policies.factory import policy_name
from amusd.reporting.answers import ANSWERS_FILE, PROMPTS_FILE, Record, answers_jsonl, prompts_csv
from amusd.reporting.columns import row_name
from amusd.tracing.accounting import time_fractions
from amusd.tracing.metrics import total
from amusd.tracing.timeline import read_timeline
from amusd.types import Mode
from amusd.workload import WorkloadPrompt

WARM_UP_TOKENS = 8
LOOK_SECONDS = 0.1
"""How often it is looked whether the next draft is there."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to decode."""

    decoding: DecodingConfig
    drafter: str | None

    @property
    def num_devices(self) -> int:
        """Devices it occupies."""
        return 1 if self.decoding.mode is Mode.AUTOREGRESSIVE else 2

    @property
    def length(self) -> int | None:
        """Tokens of a block or window; None where there are no blocks."""
        in_blocks = self.decoding.mode is Mode.SYNCHRONOUS or policy_name(self.decoding) == "windowed"
        return self.decoding.num_speculative_tokens if in_blocks else None

    @property
    def name(self) -> str:
        """For people."""
        parts = [self.decoding.mode.value]
        if self.decoding.mode is Mode.SYNCHRONOUS:
            parts.append(f"{self.decoding.num_speculative_tokens} tokens")
        if (policy := policy_name(self.decoding)) is not None:
            parts.append(policy)
        if self.drafter is not None:
            parts.append(self.drafter)
        return ", ".join(parts)


@dataclass
class Comparison:
    """What the contestants did, answer by answer. `answers[c][p]` belongs to contestant c and prompt p."""

    contestants: list[Contestant]
    prompts: list[WorkloadPrompt] = field(default_factory=list)
    encoded: list[tuple[int, ...]] = field(default_factory=list)
    answers: list[list[Generation]] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    """Prompts that did not fit: line number, reason."""
    repeatable: bool = True
    """Every mode should give the same answers."""

    @classmethod
    def of(cls, config: RunConfig) -> Comparison:
        """The contestants that `config` asks for, with nothing measured yet."""
        contestants = contestants_of(config)
        repeatable = config.sampling.rule != "rejection"
        return cls(contestants, answers=[[] for _ in contestants], repeatable=repeatable)

    def add(self, prompt: WorkloadPrompt, encoded: tuple[int, ...], answers: Mapping[int, Generation]) -> None:
        """Every contestant's answer to one prompt, by its index."""
        self.prompts.append(prompt)
        self.encoded.append(encoded)
        for index, answer in answers.items():
            self.answers[index].append(answer)


def contestants_of(config: RunConfig) -> list[Contestant]:
    """Plain decoding, then for each drafter the synchronous lengths and the asynchronous policy.

    `mode=synchronous` compares that one mode and length with plain decoding, `mode=autoregressive` only measures it.
    """
    decoding = config.decoding()
    found = [Contestant(replace(decoding, mode=Mode.AUTOREGRESSIVE), None)]
    for drafter in (drafter.kind for drafter in config.engine().drafters):
        found += [
            Contestant(replace(decoding, mode=Mode.SYNCHRONOUS, num_speculative_tokens=length), drafter)
            for length in config.synchronous_lengths()
        ]
        found += [Contestant(replace(decoding, policy=policy), drafter) for policy in config.asynchronous_policies()]
    return found


def run_comparison(
    engine: Engine,
    config: RunConfig,
    prompts: Sequence[WorkloadPrompt],
    comparison: Comparison,
    progress: Callable[[str, int, int], None],
    note: Callable[[str], None] = lambda _line: None,
) -> None:
    """Let every contestant answer every prompt, into `comparison`.

    `progress` hears what, how many of how many; `note` is told in a line when a lost draft is waited for.
    """
    contestants = comparison.contestants
    drafts = _Drafts(engine, config, contestants, note)
    drafts.warm_up()
    for turn, prompt in enumerate(prompts):
        try:
            encoded = engine.encode(prompt.turns, raw=config.workload.raw)
        except ConfigError as error:
            comparison.refused.append((prompt.number, str(error)))
            continue
        answers: dict[int, Generation] = {}
        for step in range(len(contestants)):
            index = (turn + step) % len(contestants)
            contestant = contestants[index]
            done = turn * len(contestants) + step
            drafts.wait()
            progress(f"prompt {prompt.number}: {contestant.name}", done, len(prompts) * len(contestants))
            answers[index] = engine.generate(
                encoded, config.sampling, decoding=contestant.decoding, drafter=contestant.drafter
            )
        comparison.add(prompt, encoded, answers)
    if not comparison.prompts:
        raise ConfigError(f"workload: none of {len(prompts)} prompts could be used: {comparison.refused[0][1]}")


@dataclass
class _Drafts:
    """Sees to it that a draft is there, and warm, when something is measured."""

    engine: Engine
    config: RunConfig
    contestants: Sequence[Contestant]
    note: Callable[[str], None]
    num_given_up: int = 0
    """Losses after which no draft came in time: nobody waits again before there is another."""

    def warm_up(self) -> None:
        """A short answer of every contestant, which nobody measures."""
        for contestant in self.contestants:
            self._answer(contestant, WARM_UP_TOKENS)

    def wait(self) -> None:
        """Where the draft was lost: until the next one is there, or `startup_timeout_seconds` are over."""
        if not self._is_one_missing() or len(self.engine.draft_losses) == self.num_given_up:
            return
        self.note("the draft was lost; nothing is measured before the next one is there")
        timeout = self.config.startup_timeout_seconds
        deadline = time.monotonic() + timeout
        while self._is_one_missing() and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            self._answer(self.contestants[0], 1)  # the target looks for a draft when it begins; this one needs none
            if self.engine.worker.client.has_draft:
                self.warm_up()
        if self._is_one_missing():
            self.num_given_up = len(self.engine.draft_losses)
            self.note(f"no draft came within {timeout:g} seconds; what follows is measured without one")

    def _is_one_missing(self) -> bool:
        """One was lost, and another one may come."""
        engine = self.engine
        return bool(engine.draft_losses) and not engine.worker.client.has_draft and engine.draft_failure is None

    def _answer(self, contestant: Contestant, num_tokens: int) -> None:
        params = replace(self.config.sampling, max_new_tokens=num_tokens, stop=())
        self.engine.generate("Hello", params, decoding=contestant.decoding, drafter=contestant.drafter)


def rows_of(comparison: Comparison, engine: Engine) -> list[dict[str, Any]]:
    """The documented rows: plain decoding, then for each drafter the best synchronous length and asynchronous."""
    plain = comparison.answers[0]
    rows = [_row(comparison, index, plain, engine) for index in range(len(comparison.contestants))]
    shown = [rows[0]]
    for drafter in dict.fromkeys(contestant.drafter for contestant in comparison.contestants[1:]):
        own = [row for row in rows[1:] if row["drafter"] == drafter]
        synchronous = [row for row in own if row["mode"] == Mode.SYNCHRONOUS.value]
        best = max(synchronous, key=lambda row: float(row["tokens_per_second"]))
        best["tuned"] = {str(row["num_speculative_tokens"]): row["tokens_per_second"] for row in synchronous}
        for row in (best, *(row for row in own if row["mode"] == Mode.ASYNCHRONOUS.value)):
            row["speedup_vs_best_synchronous"] = row["tokens_per_second"] / best["tokens_per_second"]
            shown.append(row)
    return shown


def per_prompt(comparison: Comparison) -> list[dict[str, Any]]:
    """For each prompt that was answered, how long every contestant took for a token: the synchronous lengths too.

    A row names its contestant, which is the key here.
    """
    return [
        {
            "number": prompt.number,
            "category": prompt.category,
            "ms_per_token": {
                contestant.name: _ms_per_token(answers[position])
                for contestant, answers in zip(comparison.contestants, comparison.answers, strict=True)
            },
        }
        for position, prompt in enumerate(comparison.prompts)
    ]


def records_of(comparison: Comparison) -> list[dict[str, Any]]:
    """Every answer, prompt by prompt, as `reporting/answers.py` keeps them; `length` where it is the schedule's own."""
    times: Counter[int] = Counter()
    repeats = []
    for prompt in comparison.prompts:
        times[prompt.number] += 1
        repeats.append(times[prompt.number])
    return [
        {
            "prompt": prompt.number,
            "mode": contestant.decoding.mode.value,
            "policy": policy_name(contestant.decoding),
            "drafter": contestant.drafter,
            "length": contestant.length,
            "repeat": repeats[position],
            "text": answer.text,
            "token_ids": list(answer.token_ids),
            "finish_reason": answer.finish_reason.value,
            "tokens": answer.metrics.num_tokens,
            "ms": answer.metrics.total_ns / 1e6,
            "accepted": answer.metrics.num_accepted,
            # Under the ratio test only the law is the same, not the answer.
            "identical": answer.token_ids == plain.token_ids if comparison.repeatable else None,
        }
        for position, (prompt, plain) in enumerate(zip(comparison.prompts, comparison.answers[0], strict=True))
        for contestant, answer in zip(
            comparison.contestants, (answers[position] for answers in comparison.answers), strict=True
        )
    ]


def _row(comparison: Comparison, index: int, plain: list[Generation], engine: Engine) -> dict[str, Any]:
    contestant, answers = comparison.contestants[index], comparison.answers[index]
    decoding = contestant.decoding
    metrics = total([answer.metrics for answer in answers]).as_dict()
    ratios = [
        _ms_per_token(reference) / _ms_per_token(answer) for reference, answer in zip(plain, answers, strict=True)
    ]
    is_synchronous = decoding.mode is Mode.SYNCHRONOUS
    return {
        "contestant": contestant.name,
        "mode": decoding.mode.value,
        "policy": policy_name(decoding),
        "drafter": contestant.drafter,
        "num_speculative_tokens": decoding.num_speculative_tokens if is_synchronous else None,
        "num_prompts": len(answers),
        **metrics,
        "speedup_vs_autoregressive": statistics.median(ratios),
        "speedup_quartiles": _quartiles(ratios) if index else None,
        "speedup_vs_best_synchronous": None,
        "num_devices": contestant.num_devices,
        "tokens_per_second_per_device": metrics["tokens_per_second"] / contestant.num_devices,
        "sequence_ids": [answer.sequence_id for answer in answers],
        # Under the ratio test only the law is the same, not the answer.
        "identical_to_autoregressive": _identity(comparison, index, plain, engine) if comparison.repeatable else None,
    }


def _quartiles(values: Sequence[float]) -> list[float] | None:
    """The first and the third; None of a single value, which has no spread."""
    if len(values) < 2:
        return None
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def _ms_per_token(answer: Generation) -> float:
    return answer.metrics.total_ns / 1e6 / answer.metrics.num_tokens


def _identity(comparison: Comparison, index: int, plain: list[Generation], engine: Engine) -> dict[str, Any]:
    """How many answers equal plain decoding's; for the others, how near to a tie the first different choice was."""
    gaps: list[float] = []
    for prompt, reference, answer in zip(comparison.encoded, plain, comparison.answers[index], strict=True):
        if reference.token_ids == answer.token_ids:
            continue
        pairs = zip(reference.token_ids, answer.token_ids, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:  # one is a prefix of the other: no tie could explain that
            gaps.append(float("inf"))
            continue
        prefix = (*prompt, *reference.token_ids[:first])
        gaps.append(engine.logit_gap(prefix, reference.token_ids[first], answer.token_ids[first]))
    return {"num_prompts": len(plain), "num_identical": len(plain) - len(gaps), "first_difference_gaps": gaps}


def compare(
    config: RunConfig, engine: Engine, console: Console, prompts: Sequence[WorkloadPrompt], run_directory: Path
) -> Done:
    """Every contestant on every prompt. What was measured is kept if the run is interrupted or this process killed."""
    comparison = Comparison.of(config)
    complete = False
    num_kept = 0

    def progress(label: str, num_done: int, number: int) -> None:
        nonlocal num_kept
        if len(comparison.prompts) > num_kept:  # between two answers, where nothing is timed
            num_kept = len(comparison.prompts)
            with suppress(ConfigError):  # what cannot be written is said at the end
                write_answers(run_directory, records_of(comparison))
        console.progress(label, num_done, number)

    try:
        run_comparison(engine, config, prompts, comparison, progress, console.note)
        complete = True
    finally:
        console.clear_progress()
        if not complete and comparison.prompts:
            write_json(run_directory / "result.json", {"complete": False, "rows": rows_of(comparison, engine)})
            write_answers(run_directory, records_of(comparison))
    rows = rows_of(comparison, engine)
    timeline = read_timeline(run_directory)
    for row in rows:
        sequence_ids = row.pop("sequence_ids")
        row["draft_overlap_fraction"] = timeline.draft_overlap(sequence_ids)
        row["time"] = time_fractions(timeline, sequence_ids)
    result = {
        "complete": True,
        "rows": rows,
        "per_prompt": per_prompt(comparison),
        "num_refused_prompts": len(comparison.refused),
        "environment": read_json(run_directory / "environment.json"),
    }
    notes = [f"prompt {number} was left out: {reason}" for number, reason in comparison.refused]
    return Done(result, _comparison_table(rows), notes, records_of(comparison))


def _comparison_table(rows: Sequence[dict[str, Any]]) -> str:
    header = (
        "mode",
        "tokens/s",
        "x plain",
        "quartiles",
        "x best sync",
        "accepted",
        "tokens/pass",
        "idle t/d",
        "identical",
    )
    lines: list[tuple[str, ...]] = []
    for row in rows:
        same = row["identical_to_autoregressive"]
        plain = row["mode"] == Mode.AUTOREGRESSIVE.value
        lines.append(
            (
                row_name(row),
                f"{row['tokens_per_second']:.1f}",
                f"{row['speedup_vs_autoregressive']:.2f}",
                "-".join(f"{quartile:.2f}" for quartile in row["speedup_quartiles"] or ()),
                "" if plain else f"{row['speedup_vs_best_synchronous']:.2f}",
                "" if plain else percent(row["acceptance_rate"]),
                f"{row['mean_acceptance_length']:.2f}",
                percent(row["target_idle_fraction"]) + ("" if plain else "/" + percent(row["draft_idle_fraction"])),
                "" if plain or same is None else f"{same['num_identical']}/{same['num_prompts']}",
            )
        )
    return table(header, lines)


def write_answers(run_directory: Path, records: Sequence[Record]) -> None:
    """Keep every answer of a comparison."""
    write_whole(run_directory / ANSWERS_FILE, answers_jsonl(records))
    write_whole(run_directory / PROMPTS_FILE, prompts_csv(records))
