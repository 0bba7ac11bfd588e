"""Plain, synchronous and asynchronous decoding on the same prompts, models and devices, in one run.

Contestants take turns in rotating order, so that a drifting machine treats them alike. A turn is a prompt, or with
several answers at a time (`compare.batch_sizes`) a load, whose speed is that of all answers together.

A synchronous row shows the fastest of `compare.synchronous_lengths`. A lost draft is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from amusd.answer import Generation
from amusd.commands.advice import advice
from amusd.commands.contestants import Comparison, Contestant, per_prompt, records_of, rows_of
from amusd.commands.generate import Done, Scripts, in_flight
from amusd.commands.tables import comparison_table
from amusd.config import RunConfig, SamplingParams
from amusd.console import Console
from amusd.engine import Engine
from amusd.errors import ConfigError
from amusd.files import (
    ANSWERS_FILE,
    PROMPTS_FILE,
    Record,
    answers_jsonl,
    prompts_csv,
    read_json,
    write_json,
    write_whole,
)
from amusd.workload import WorkloadPrompt

WARM_UP_TOKENS = 8
LOAD_SIZE = 4
"""Answers of a load per place; at its end some places are free."""
LOOK_SECONDS = 0.1


def run_comparison(
    engine: Engine,
    config: RunConfig,
    prompts: Sequence[WorkloadPrompt],
    comparison: Comparison,
    progress: Callable[[str, int, int], None],
    note: Callable[[str], None] = lambda _line: None,
) -> None:
    """Let every contestant answer every prompt, into `comparison`.

    `progress` hears what, how many of how many; `note` hears when a lost draft is waited for.
    """
    drafts = _Drafts(engine, config, comparison.contestants, note)
    drafts.warm_up()
    for prompt in prompts:
        try:
            encoded = engine.encode(prompt.turns, raw=config.workload.raw)
        except ConfigError as error:
            comparison.refused.append((prompt.number, str(error)))
            continue
        comparison.prompts.append(prompt)
        comparison.encoded.append(encoded)
    if not comparison.prompts:
        raise ConfigError(f"workload: none of {len(prompts)} prompts could be used: {comparison.refused[0][1]}")
    turns = list(_turns(comparison))
    num_done, num_answers = 0, sum(len(load) for turn in turns for _, load in turn)
    for turn in turns:
        answered = []
        for index, load in turn:
            contestant = comparison.contestants[index]
            drafts.wait()
            progress(f"prompt {comparison.prompts[load[0]].number}: {contestant.name}", num_done, num_answers)
            own = [comparison.encoded[place] for place in load]
            answered.append((index, *answer(drafts.scripts, contestant, own, config.sampling)))
            num_done += len(load)
        for index, generations, seconds in answered:
            comparison.answers[index] += generations
            comparison.seconds[index] += seconds


def answer(
    scripts: Scripts, contestant: Contestant, prompts: Sequence[tuple[int, ...]], params: SamplingParams
) -> tuple[list[Generation], float]:
    """The answers in the order of the prompts, and the seconds from the first request to the last token."""
    engine = scripts.engine
    asked = partial(engine.submit, decoding=contestant.decoding, drafter=contestant.drafter)
    references = [scripts.of(prompt, params, contestant.decoding, contestant.drafter) for prompt in prompts]
    submitted = (
        (number, asked(prompt, params, reference=reference))
        for number, (prompt, reference) in enumerate(zip(prompts, references, strict=True))
    )
    begin = time.perf_counter()
    answers = dict(in_flight(engine, submitted, contestant.batch_size))
    generations = [answers[number].result() for number in range(len(prompts))]
    return generations, max(one.all_tokens_at or begin for one in answers.values()) - begin


def _turns(comparison: Comparison) -> Iterator[list[tuple[int, list[int]]]]:
    """Contestants in order, and the prompts' places for each.

    Loads come last: they are compared with plain decoding of one.
    """
    number = len(comparison.prompts)
    sizes = [contestant.batch_size for contestant in comparison.contestants]
    for are_alone in (True, False):
        loads: dict[int, list[list[int]]] = {}
        for index, size in enumerate(sizes):
            if (size == 1) is are_alone:
                places = [*range(number)] * -(-size // number)  # all of its places are taken
                step = 1 if are_alone else LOAD_SIZE * size
                loads[index] = [places[start : start + step] for start in range(0, len(places), step)]
        for turn in range(max(map(len, loads.values()), default=0)):
            going_on = [index for index, own in loads.items() if turn < len(own)]
            first = turn % len(going_on)
            yield [(index, loads[index][turn]) for index in (*going_on[first:], *going_on[:first])]


class _Drafts:
    """Sees to it that a draft is there, and warm, when something is measured."""

    def __init__(
        self, engine: Engine, config: RunConfig, contestants: Sequence[Contestant], note: Callable[[str], None]
    ) -> None:
        self._engine, self._config, self._contestants, self._note = engine, config, contestants, note
        self.scripts = Scripts(engine)
        self._num_given_up = 0

    def warm_up(self) -> None:
        for contestant in self._contestants:
            self._answer(contestant, WARM_UP_TOKENS)

    def wait(self) -> None:
        if not self._is_one_missing() or len(self._engine.draft_losses) == self._num_given_up:
            return
        self._note("the draft was lost; nothing is measured before the next one is there")
        timeout = self._config.startup_timeout_seconds
        deadline = time.monotonic() + timeout
        while self._is_one_missing():
            if time.monotonic() > deadline:
                self._num_given_up = len(self._engine.draft_losses)
                self._note(f"no draft came within {timeout:g} seconds; what follows is measured without one")
                return
            time.sleep(LOOK_SECONDS)
            self._answer(self._contestants[0], 1)  # the target looks for a draft when it begins; this one needs none
        if self._engine.worker.client.has_draft:
            self.warm_up()

    def _is_one_missing(self) -> bool:
        engine = self._engine
        return bool(engine.draft_losses) and not engine.worker.client.has_draft and engine.draft_failure is None

    def _answer(self, contestant: Contestant, num_tokens: int) -> None:
        params = replace(self._config.sampling, max_new_tokens=num_tokens, stop=())
        answer(self.scripts, contestant, [self._engine.encode("Hello")] * contestant.batch_size, params)


def compare(
    config: RunConfig, engine: Engine, console: Console, prompts: Sequence[WorkloadPrompt], run_directory: Path
) -> Done:
    """Every contestant on every prompt. Results are kept if the run is interrupted or killed."""
    comparison = Comparison.of(config)
    complete = False
    num_kept = 0

    def progress(label: str, num_done: int, number: int) -> None:
        nonlocal num_kept
        if len(comparison.answers[0]) > num_kept:  # between two answers, where nothing is timed
            num_kept = len(comparison.answers[0])
            with suppress(ConfigError):  # what cannot be written is said at the end
                write_answers(run_directory, records_of(comparison))
        console.progress(label, num_done, number)

    try:
        run_comparison(engine, config, prompts, comparison, progress, console.note)
        complete = True
    finally:
        console.clear_progress()
        if not complete and comparison.answers[0]:
            write_json(run_directory / "result.json", {"complete": False, "rows": rows_of(comparison, engine)})
            write_answers(run_directory, records_of(comparison))
    rows = rows_of(comparison, engine)
    result = {
        "complete": True,
        "rows": rows,
        "per_prompt": per_prompt(comparison),
        "num_refused_prompts": len(comparison.refused),
        "environment": read_json(run_directory / "environment.json"),
    }
    notes = [f"prompt {number} was left out: {reason}" for number, reason in comparison.refused]
    sizes = dict.fromkeys(row["batch_size"] for row in rows)
    advices = {size: advice([row for row in rows if row["batch_size"] == size]) for size in sizes}
    lines = [f"{size} at a time: {text}" if len(sizes) > 1 else text for size, text in advices.items() if text]
    text = "\n\n".join(filter(None, (comparison_table(rows), "\n".join(lines))))
    return Done(result, text, notes, records_of(comparison))


def write_answers(run_directory: Path, records: Sequence[Record]) -> None:
    """Keep every answer of a comparison."""
    write_whole(run_directory / ANSWERS_FILE, answers_jsonl(records))
    write_whole(run_directory / PROMPTS_FILE, prompts_csv(records))
