"""`amusd generate`: one answer, streamed, with its figures; or a file of answers, many at a time."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from amusd.answer import Answer, Generation
from amusd.config import DecodingConfig, RunConfig, SamplingParams
from amusd.console import Console, percent
from amusd.engine import Engine
from amusd.errors import ConfigError
from amusd.files import PARTIAL_FILE, Record, write_json
from amusd.schedule import SYNTHETIC
from amusd.tracing.metrics import TargetCounts
from amusd.types import Mode
from amusd.workload import AnswersFile, WorkloadPrompt, prompts_of


class Done(NamedTuple):
    """The result of a command, in the forms in which it is shown."""

    result: dict[str, Any]
    text: str
    """The text that standard output still lacks, for a person."""
    notes: Sequence[str]
    records: Sequence[Record] = ()


def generate(config: RunConfig, engine: Engine, console: Console, prompt: WorkloadPrompt, run_directory: Path) -> Done:
    """One answer, streamed. A partial answer is kept when the run is interrupted or killed."""
    if config.prompt is None:
        console.text(f"> {prompt.text}\n")
    decoding, prompt_ids = config.decoding(), engine.encode(prompt.turns, raw=config.workload.raw)
    reference = Scripts(engine).of(prompt_ids, config.sampling, decoding)
    answer = engine.stream(prompt_ids, config.sampling, decoding=decoding, reference=reference)
    complete = False
    partial_file = run_directory / PARTIAL_FILE
    partial_file.unlink(missing_ok=True)  # a file, or a link, that lay in the folder before
    try:
        with console.streaming(partial(_status, engine, engine.counts, time.perf_counter())) as write:
            for token in answer:
                _append(partial_file, token.text)
                write(token.text)
        complete = True
    finally:
        if not complete:
            kept = {"complete": False, "text": answer.text, "token_ids": list(answer.token_ids)}
            write_json(run_directory / "result.json", kept)
            partial_file.unlink(missing_ok=True)
            console.text("")
    return Done({"complete": True, **answer.generation.as_dict()}, "", (_summary(answer.generation),))


def generate_file(config: RunConfig, engine: Engine, console: Console, run_directory: Path) -> Done:
    """Answer the rest of a file of prompts. Each answer is in the file `out` as soon as those before it are."""
    out = AnswersFile(config)
    with out.opened() as file:
        prompts = prompts_of("generate", config)  # nobody else adds to the file from now on
        run = _FileRun(out, file, prompts)
        try:
            submitted = run.submitted(engine, config)
            with closing(in_flight(engine, submitted, engine.worker.max_num_seqs)) as answers:
                for place, answer in answers:
                    run.add(place, answer.result())
                    console.progress(f"{run.tokens_per_second:.1f} tokens/s", run.num_over, len(prompts))
            run.complete = True
        finally:
            console.clear_progress()
            result = {
                "complete": run.complete,
                "out": str(out.path),
                "num_prompts": len(prompts),
                "num_answers": run.num_written,
                "num_refused_prompts": len(run.refused),
                "num_tokens": run.num_tokens,
                "seconds": run.seconds,
                "tokens_per_second": run.tokens_per_second,
                "max_num_seqs": engine.worker.max_num_seqs,
            }
            if not run.complete:
                write_json(run_directory / "result.json", result)
    text = (
        f"{out.path}: {run.num_written} answers, {run.num_tokens} tokens in {run.seconds:.1f} s: "
        f"{run.tokens_per_second:.1f} tokens/s"
    )
    return Done(result, text, run.refused)


@dataclass
class _FileRun:
    """The answers that one run adds to a file. A place is an index into `prompts`."""

    out: AnswersFile
    file: BinaryIO
    prompts: Sequence[WorkloadPrompt]
    complete: bool = False
    begin: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    num_tokens: int = 0
    num_written: int = 0
    refused: list[str] = field(default_factory=list)
    num_done: int = 0
    waiting: dict[int, bytes] = field(default_factory=dict)

    def submitted(self, engine: Engine, config: RunConfig) -> Iterator[tuple[int, Answer]]:
        scripts = Scripts(engine)
        for place, prompt in enumerate(self.prompts):
            try:
                token_ids = engine.encode(prompt.turns, raw=config.workload.raw)
            except ConfigError as error:
                self.refused.append(f"prompt {prompt.number} was left out: {error}")
                self.waiting[place] = b""
                continue
            reference = scripts.of(token_ids, config.sampling, config.decoding())
            yield place, engine.submit(token_ids, config.sampling, decoding=config.decoding(), reference=reference)

    def add(self, place: int, generation: Generation) -> None:
        self.num_tokens += len(generation.token_ids)
        self.seconds = time.perf_counter() - self.begin
        self.waiting[place] = self.out.line(self.prompts[place], generation.as_dict())
        while (line := self.waiting.pop(self.num_done, None)) is not None:
            self.file.write(line)
            self.num_written += line != b""
            self.num_done += 1
        self.file.flush()

    @property
    def num_over(self) -> int:
        return self.num_done + len(self.waiting)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


@dataclass
class Scripts:
    """Answers of plain decoding that the synthetic drafter has to be told; each is decoded once, unmeasured."""

    engine: Engine
    _known: dict[tuple[tuple[int, ...], SamplingParams], tuple[int, ...]] = field(default_factory=dict)

    def of(
        self, prompt: tuple[int, ...], params: SamplingParams, decoding: DecodingConfig, drafter: str | None = None
    ) -> tuple[int, ...]:
        """The answer to a prompt; empty unless the synthetic drafter is asked."""
        names = (drafter,) if drafter else self.engine.drafters[:1]
        if decoding.mode is Mode.AUTOREGRESSIVE or SYNTHETIC not in names:
            return ()
        if (prompt, params) not in self._known:
            plain = replace(decoding, mode=Mode.AUTOREGRESSIVE)
            self._known[prompt, params] = self.engine.generate(prompt, params, decoding=plain).token_ids
        return self._known[prompt, params]


def in_flight(
    engine: Engine, submitted: Iterator[tuple[int, Answer]], number: int
) -> Generator[tuple[int, Answer], None, None]:
    """Keep `number` answers of `submitted` in the making; yield those that are over, as they end."""
    flying: dict[int, Answer] = {}
    try:
        while True:
            num_free = number - sum(answer.all_tokens_at is None for answer in flying.values())
            flying.update(islice(submitted, max(0, num_free)))
            if not flying:
                return
            engine.turns.step()
            for index in [index for index, answer in flying.items() if answer.is_over]:
                yield index, flying.pop(index)
    finally:
        for answer in flying.values():
            answer.cancel()


def _status(engine: Engine, before: TargetCounts, begin: float) -> str:
    """What the engine has done since `begin`, in a line that is short enough for a terminal."""
    counts = engine.counts
    num_tokens = counts.num_tokens - before.num_tokens
    num_verified = counts.num_verified - before.num_verified
    num_accepted = counts.num_accepted - before.num_accepted
    parts = [f"{num_tokens / (time.perf_counter() - begin):.1f} tokens/s"]
    if num_verified:
        per_pass = num_tokens / max(1, counts.num_passes - before.num_passes)
        accepted = f"{num_accepted} of {num_verified} accepted"
        parts += [f"{per_pass:.2f} tokens a pass", accepted, f"draft {engine.draft.value}"]
    return "; ".join(parts)


def _summary(generation: Generation) -> str:
    figures = generation.metrics.as_dict()
    parts = [
        f"{generation.mode.value}: {figures['num_tokens']} tokens ({generation.finish_reason.value})",
        f"{figures['tokens_per_second']:.1f} tokens/s, first after {figures['time_to_first_token_ms']:.0f} ms",
    ]
    if generation.drafter is not None:
        counts = f"{figures['num_accepted_draft_tokens']} of {figures['num_draft_tokens']}"
        parts += [
            f"drafter {generation.drafter}: {counts} candidates accepted",
            f"{figures['mean_acceptance_length']:.2f} tokens a pass",
            f"target idle {percent(figures['target_idle_fraction'])}",
            f"draft idle {percent(figures['draft_idle_fraction'])}",
        ]
    return "; ".join(parts)


def _append(path: Path, text: str) -> None:
    """Append to a file if it can take more; a failing result file reports at its end."""
    if text:
        with suppress(OSError), path.open("a", encoding="utf-8") as file:
            file.write(text)
