"""Plain, synchronous and asynchronous decoding on the same prompts, models and devices, in one run.

The contestants of a batch size take turns in rotating order, so that a change in the machine's speed affects all alike.
In a turn each contestant answers one prompt or, in batches (`compare.batch_sizes`), a load of prompts timed as a whole.
A synchronous row shows the fastest of `compare.synchronous_lengths`. While a draft is lost, nothing is measured.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from amusd.answer import Generation
from amusd.commands import plots
from amusd.commands.contestants import Contestant, contestants_of
from amusd.commands.generate import Encoded, in_flight, options_of, unfolded
from amusd.commands.job import Done, Job
from amusd.commands.tables import OF_CATEGORIES, report, summary_of, with_the_best
from amusd.config import RunConfig, SamplingParams
from amusd.engine import Engine
from amusd.errors import ConfigError
from amusd.files import ANSWERS_FILE, RESULT_FILE, read_json, write_json, write_whole
from amusd.logs import end_progress, logger, show_progress
from amusd.models.passes import Rows
from amusd.tracing.metrics import total
from amusd.workload import WorkloadPrompt

WARM_UP_TOKENS = 8
LOAD_SIZE = 4
"""Answers of a load per place in the batch. With more answers, empty places at the end count less."""
LOOK_SECONDS = 0.1


def run(job: Job) -> int:
    """Compare, and draw a figure; return the exit code."""
    return job.answer(compare)


def compare(job: Job, engine: Engine) -> Done:
    """Run every contestant on every prompt; keep what was measured if the run is interrupted or killed."""
    comparison, folder = Comparison(engine, job.config, contestants_of(job.config)), job.folder

    def keep_answers() -> None:
        lines = (json.dumps(record) + "\n" for record in comparison.records())
        write_whole(folder / ANSWERS_FILE, "".join(lines))

    def notes() -> Iterator[str]:
        yield from comparison.refused
        yield plots.write(lambda: plots.draw_comparison(rows), folder, "comparison")  # after the result is kept

    try:
        for _ in comparison.turns(job.prompts):
            with suppress(ConfigError):  # the last `keep_answers` raises it
                keep_answers()
    except BaseException:
        if comparison.plain.answers:
            comparison.computes_gaps = False  # a signal leaves little time
            write_json(folder / RESULT_FILE, {"complete": False, "rows": comparison.rows()})
        raise
    finally:
        end_progress()
    keep_answers()
    rows = comparison.rows()
    result: dict[str, Any] = {"complete": True, "rows": rows, "num_refused_prompts": len(comparison.refused)}
    result["environment"] = read_json(folder / "environment.json")
    result["summary"] = summary_of(rows, job.config, result["environment"])
    return result, report(rows, ["wasted_draft_fraction"], result["summary"]), notes()


@dataclass
class Comparison:
    """Measures the contestants in turns, each with a draft that is present and warm."""

    engine: Engine
    config: RunConfig
    contestants: list[Contestant]
    prompts: list[Encoded] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    computes_gaps: bool = True
    """Whether rows have the logit gaps (`first_gap`) of differing answers."""

    def __post_init__(self) -> None:
        self._options = options_of(self.engine)

    @property
    def plain(self) -> Contestant:
        """Plain decoding of one answer at a time."""
        return self.contestants[0]

    @property
    def repeatable(self) -> bool:
        """Whether all modes should give the same answers; the ratio test keeps only the distribution."""
        return self.config.sampling.rule != "rejection"

    def turns(self, prompts: Sequence[WorkloadPrompt]) -> Iterator[None]:
        """Have every contestant answer every prompt; yields after each turn. Raises `ConfigError` if no prompt fits."""
        self._warm_up()
        self.prompts = [encoded for prompt in prompts for encoded in self._unfolded(prompt)]
        if not self.prompts:
            raise ConfigError(f"workload: none of {len(prompts)} prompts could be used: {self.refused[0]}")
        turns = list(self._turns())
        num_done, num_answers = 0, sum(len(contestants) * len(load) for contestants, load in turns)
        for contestants, load in turns:
            answered = []
            for contestant in contestants:
                self._wait_for_draft()
                show_progress(f"prompt {load[0][0].number}: {contestant.name}", num_done, num_answers)
                own = [token_ids for _, token_ids in load]
                answered.append((contestant, *self.answer(contestant, own, self.config.sampling)))
                num_done += len(load)
            for contestant, generations, seconds in answered:  # an interrupted turn counts for no contestant
                contestant.answers += generations
                contestant.seconds += seconds
            yield

    def _unfolded(self, prompt: WorkloadPrompt) -> Iterator[Encoded]:
        """Every turn of a conversation; unmeasured plain decoding gives the answers between turns."""
        said = list[str]()
        for asked, token_ids in unfolded(self.engine, prompt, said, self.refused, raw=self.config.workload.raw):
            yield asked, token_ids
            if asked.later:
                show_progress(f"prompt {asked.number}: the answer before turn {asked.turn + 1}", 0, 1)
                plain = self.engine.generate(token_ids, self.config.sampling, decoding=self.plain.decoding)
                said.append(plain.text)

    def _turns(self) -> Iterator[tuple[list[Contestant], list[Encoded]]]:
        """For each turn its contestants in order, and the prompts for each of them; batch size 1 first."""
        for size, own in self._by_size():
            load = self.prompts * -(-size // len(self.prompts))  # fills the batch
            step = 1 if size == 1 else LOAD_SIZE * size
            for turn, start in enumerate(range(0, len(load), step)):
                first = turn % len(own)
                yield [*own[first:], *own[:first]], load[start : start + step]

    def _by_size(self) -> Iterator[tuple[int, list[Contestant]]]:
        for size in dict.fromkeys(contestant.batch_size for contestant in self.contestants):
            yield size, [contestant for contestant in self.contestants if contestant.batch_size == size]

    def answer(
        self, contestant: Contestant, prompts: Sequence[tuple[int, ...]], params: SamplingParams
    ) -> tuple[list[Generation], float]:
        """The answers in the order of the prompts, and the seconds from the first request to the last token."""
        options = [self._options(prompt, params, contestant.decoding, contestant.drafter) for prompt in prompts]
        pairs = zip(prompts, options, strict=True)
        submitted = (iter([self.engine.submit(prompt, params, **own)]) for prompt, own in pairs)
        begin = time.perf_counter()
        answers = list(in_flight(self.engine, submitted, contestant.batch_size))
        return [answer.result() for answer in answers], max(answer.all_tokens_at or begin for answer in answers) - begin

    def _warm_up(self) -> None:
        params = replace(self.config.sampling, max_new_tokens=WARM_UP_TOKENS, stop=())
        for contestant in self.contestants:
            self.answer(contestant, [self.engine.encode("Hello")] * contestant.batch_size, params)

    def _wait_for_draft(self) -> None:
        if not self._is_draft_away():
            return
        logger.info("the draft was lost; nothing is measured before the next one is there")
        deadline = time.monotonic() + self.config.startup_timeout_seconds
        while self._is_draft_away() and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
            self.engine.scheduler.step()  # which looks for a draft
        self._warm_up()

    def _is_draft_away(self) -> bool:
        return self.engine.draft.presence == "away"

    def records(self) -> list[dict[str, Any]]:
        """The lines of `answers.jsonl`: every answer, prompt by prompt."""
        return [
            {
                "prompt": prompt.number,
                **prompt.labels,
                "contestant": contestant.name,
                **contestant.settings,
                "text": answer.text,
                "token_ids": list(answer.token_ids),
                "finish_reason": answer.finish_reason,
                "tokens": answer.metrics.num_tokens,
                "ms": answer.metrics.total_ns / 1e6,
                "accepted": answer.metrics.num_accepted,
                "identical": answer.token_ids == self.plain.answers[place].token_ids if self.repeatable else None,
            }
            for place, (prompt, _) in enumerate(self.prompts)
            for contestant in self.contestants
            for answer in contestant.answers[place :: len(self.prompts)]
        ]

    def rows(self) -> list[dict[str, Any]]:
        """The documented rows of each batch size that all contestants have answered."""
        shown: list[dict[str, Any]] = []
        for _, own in self._by_size():
            if all(contestant.answers for contestant in own):
                shown += with_the_best([self._row(contestant) for contestant in own])
        return shown

    def _row(self, contestant: Contestant) -> dict[str, Any]:
        answers, is_alone = contestant.answers, contestant.batch_size == 1
        figures = total([answer.metrics for answer in answers]).as_dict()
        median = quartiles = None
        if is_alone:
            ratios = list(map(speedup, self.plain.answers, answers))
            median = statistics.median(ratios)
            if len(ratios) > 1 and contestant is not self.plain:
                quartiles = statistics.quantiles(ratios, n=4, method="inclusive")[::2]
        else:
            figures["tokens_per_second"] = figures["num_tokens"] / contestant.seconds
            # the workers were also busy with the other answers of the batch
            figures |= dict.fromkeys(("target_idle_fraction", "target_wait_fraction", "draft_idle_fraction"))
        return {
            "contestant": contestant.name,
            **contestant.settings,
            "p50_inter_token_ms": figures["median_inter_token_latency_ms"],
            "p99_inter_token_ms": figures["p99_inter_token_latency_ms"],
            "num_prompts": len(answers),
            **figures,
            "speedup_vs_autoregressive": median,
            "speedup_quartiles": quartiles,
            "categories": self._by_category(contestant) if is_alone else {},
            "speedup_vs_best_synchronous": None,
            "num_devices": contestant.num_devices,
            "tokens_per_second_per_device": figures["tokens_per_second"] / contestant.num_devices,
            "sequence_ids": [answer.sequence_id for answer in answers],
            "identical_to_autoregressive": self._identity(contestant) if self.repeatable else None,
        }

    def _by_category(self, contestant: Contestant) -> dict[str, dict[str, Any]]:
        found = dict[str, list[Sequence[Generation]]]()
        for (prompt, _), *pair in zip(self.prompts, self.plain.answers, contestant.answers, strict=False):
            found.setdefault(prompt.category or "none", []).append(pair)
        return {name: _figures(own) for name, own in found.items() if {*found} != {"none"}}

    def _identity(self, contestant: Contestant) -> dict[str, Any]:
        asked = itertools.cycle(zip(self.prompts, self.plain.answers, strict=False))
        gaps = [
            first_gap(self.engine, token_ids, plain.token_ids, answer.token_ids) if self.computes_gaps else None
            for ((_, token_ids), plain), answer in zip(asked, contestant.answers, strict=False)
            if plain.token_ids != answer.token_ids
        ]
        number = len(contestant.answers)
        return {"num_prompts": number, "num_identical": number - len(gaps), "first_difference_gaps": gaps}


def _figures(answers: Sequence[Sequence[Generation]]) -> dict[str, Any]:
    """Figures of one category. `answers`: pairs of plain decoding's answer and the contestant's."""
    figures = total([answer.metrics for _, answer in answers]).as_dict()
    figures["speedup_vs_autoregressive"] = statistics.median(itertools.starmap(speedup, answers))
    return {"num_prompts": len(answers), **{name: figures[name] for name in OF_CATEGORIES}}


def speedup(plain: Generation, answer: Generation) -> float:
    """Time per token of plain decoding divided by that of another answer; both include the prompt."""
    first, second = (one.metrics.total_ns / one.metrics.num_tokens for one in (plain, answer))
    return first / second


def first_gap(engine: Engine, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int]) -> float | None:
    """Logit of the expected token minus that of the found token where they first differ; None: one text is a prefix."""
    place = next((place for place, pair in enumerate(zip(expected, found, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return None
    prefix, model = (*prompt, *expected[:place]), engine.worker.model
    with engine.scheduler.alone():
        [cache] = model.new_caches(1, len(prefix))
        model.prefill(prefix[:-1], cache)
        logits = model.run([Rows(prefix[-1:], cache)])[0].logits[0]
    return float(logits[expected[place]]) - float(logits[found[place]])
