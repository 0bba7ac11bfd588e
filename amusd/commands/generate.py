"""`amusd generate`: one answer, streamed, with its figures; or a file of answers, many at a time."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from itertools import chain, islice
from typing import Any, TypeAlias

from amusd.answer import Answer, Generation
from amusd.commands.job import Done, Job
from amusd.config import DecodingConfig, RunConfig, SamplingParams
from amusd.console import percent
from amusd.engine import Engine, Options
from amusd.errors import ConfigError
from amusd.files import PARTIAL_FILE, RESULT_FILE, write_json
from amusd.logs import end_progress, show_progress
from amusd.policies.factory import SYNTHETIC
from amusd.workload import AnswersFile, WorkloadPrompt, prompts_of

Encoded: TypeAlias = tuple[WorkloadPrompt, tuple[int, ...]]
"""A prompt and its token ids."""


def run(job: Job) -> int:
    """Answer a prompt, or a file of prompts; return the exit code."""
    return job.answer(generate if job.config.out is None else generate_file)


def generate(job: Job, engine: Engine) -> Done:
    """Stream one answer, or the answers of one conversation; return the last as the result."""
    config, asker, summaries = job.config, Asker(engine, job.config), list[str]()
    engine.encode(job.prompts[0].turns, raw=config.workload.raw)  # raises for a bad prompt
    result: dict[str, Any] = {"complete": True}
    for answer in asker.conversation(job.prompts[0]):
        prompt = asker.prompts[answer]
        if config.prompt is None:
            job.console.text("\n\n" * (prompt.turn > 1) + f"> {prompt.text}\n")
        _show(job, engine, answer)
        summaries.append(_summary(answer.generation))
        result |= answer.generation.as_dict()
        result |= {"turn": prompt.turn, "prompt": prompt.asked} if prompt.turn > 1 else {}
    return result, "", [*summaries, *asker.refused]


def _show(job: Job, engine: Engine, answer: Answer) -> None:
    """Stream an answer; keep the part that there is if the run is interrupted or killed."""
    partial_file = job.folder / PARTIAL_FILE
    partial_file.unlink(missing_ok=True)  # a file or link of before this run
    try:
        with job.console.streaming(functools.partial(_status, engine, answer, time.perf_counter())) as write:
            for token in answer:
                with suppress(OSError), partial_file.open("a", encoding="utf-8") as file:
                    file.write(token.text)  # a full disk is reported when the result is written
                write(token.text)
    except BaseException:
        kept = {"complete": False, "text": answer.text, "token_ids": list(answer.token_ids)}
        write_json(job.folder / RESULT_FILE, kept)
        job.console.text("")
        raise
    finally:
        partial_file.unlink(missing_ok=True)


def generate_file(job: Job, engine: Engine) -> Done:
    """Answer the rest of a file of prompts. `out` gets each answer right after all earlier answers."""
    config, max_num_seqs, begin = job.config, engine.worker.max_num_seqs, time.perf_counter()
    out, asker = AnswersFile(config), Asker(engine, config)
    result: dict[str, Any] = {"complete": False, "out": str(out.path), "max_num_seqs": max_num_seqs}
    result |= {"num_answers": 0, "num_tokens": 0, "seconds": 0.0, "tokens_per_second": 0.0}
    with out.opened() as file:
        prompts = prompts_of("generate", config)  # read again: no other run adds to the file now
        num_turns = sum(prompt.num_turns for prompt in prompts)
        try:
            with closing(in_flight(engine, map(asker.conversation, prompts), max_num_seqs)) as answers:
                for number, answer in enumerate(answers, start=1):
                    generation = answer.result()
                    out.append(file, asker.prompts.pop(answer), generation.as_dict())
                    num_tokens, seconds = result["num_tokens"] + len(generation.token_ids), time.perf_counter() - begin
                    result |= {"num_answers": number, "num_tokens": num_tokens, "seconds": seconds}
                    result["tokens_per_second"] = num_tokens / seconds
                    show_progress(f"{num_tokens / seconds:.1f} tokens/s", number + len(asker.refused), num_turns)
            result["complete"] = True
        finally:
            end_progress()
            result |= {"num_prompts": len(prompts), "num_refused_prompts": len(asker.refused)}
            if not result["complete"]:
                write_json(job.folder / RESULT_FILE, result)
    text = "{out}: {num_answers} answers, {num_tokens} tokens: {tokens_per_second:.1f} tokens/s"
    return result, text.format(**result), asker.refused


class Asker:
    """Asks an engine the prompts of a run."""

    def __init__(self, engine: Engine, config: RunConfig) -> None:
        self.prompts = dict[Answer, WorkloadPrompt]()
        """The prompt of each answer."""
        self.refused = list[str]()
        """A line for each prompt or turn that could not be used."""
        self._engine, self._config, self._options = engine, config, options_of(engine)

    def conversation(self, first: WorkloadPrompt) -> Iterator[Answer]:
        """Yield the answers of a conversation; a turn is asked once the answer before is over."""
        config, said = self._config, list[str]()
        for prompt, token_ids in unfolded(self._engine, first, said, self.refused, raw=config.workload.raw):
            options = self._options(token_ids, config.sampling, config.decoding())
            answer = self._engine.submit(token_ids, config.sampling, **options)
            self.prompts[answer] = prompt
            yield answer
            if prompt.later:
                try:
                    said.append(answer.result().text)
                except Exception:  # noqa: BLE001 - raised again after the earlier answers
                    return


def options_of(engine: Engine) -> Callable[..., Options]:
    """Return `options(prompt, params, decoding, drafter)`, which `Engine.stream` takes beside prompt and parameters.

    A synthetic drafter's reference is plain decoding's answer, which is decoded once and not measured.
    """

    @functools.cache
    def plain_answer(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
        return engine.generate(prompt, params, decoding=DecodingConfig(mode="autoregressive")).token_ids

    def options(
        prompt: tuple[int, ...], params: SamplingParams, decoding: DecodingConfig, drafter: str | None = None
    ) -> Options:
        is_synthetic = (drafter or next(iter(engine.drafters), None)) == SYNTHETIC
        reference = plain_answer(prompt, params) if is_synthetic and decoding.mode != "autoregressive" else ()
        return {"decoding": decoding, "drafter": drafter, "reference": reference}

    return options


def unfolded(
    engine: Engine, prompt: WorkloadPrompt, said: Sequence[str], refused: list[str], *, raw: bool
) -> Iterator[Encoded]:
    """Yield a prompt and its tokens, then each further turn of its conversation.

    Before the next turn, the caller adds the answer to `said`. A turn that cannot be used ends the conversation, with a
    line in `refused`.
    """
    asked: WorkloadPrompt | None = prompt
    while asked is not None:
        try:
            token_ids = engine.encode(asked.turns, raw=raw)
        except ConfigError as error:
            turn = f", turn {asked.turn}," if asked.turn > 1 else ""
            refused.append(f"prompt {asked.number}{turn} was left out: {error}")
            return
        yield asked, token_ids
        asked = asked.following(said[-1]) if asked.later else None


def in_flight(
    engine: Engine, conversations: Iterator[Iterator[Answer]], num_answers: int
) -> Generator[Answer, None, None]:
    """Compute `num_answers` answers at a time; yield finished answers, in the order of conversations.

    A turn is asked when the answer before is over.
    """
    begun = ((rest, own) for rest in conversations if (own := deque(islice(rest, 1))))
    flying: deque[tuple[Iterator[Answer], deque[Answer]]] = deque()
    try:
        while True:
            num_free = num_answers - sum(own[-1].all_tokens_at is None for _, own in flying)
            flying.extend(islice(begun, max(0, num_free)))
            if not flying:
                return
            engine.scheduler.step()
            for rest, own in flying:
                if own[-1].is_over:
                    own.extend(islice(rest, 1))
            while flying and flying[0][1][0].is_over:
                rest, own = flying[0]
                if len(own) == 1:  # it ended after the loop above
                    own.extend(islice(rest, 1))
                yield own.popleft()
                if not own:
                    flying.popleft()
    finally:
        for answer in chain.from_iterable(own for _, own in flying):
            answer.cancel()


def _status(engine: Engine, answer: Answer, begin: float) -> str:
    """The speed and the engine's counts in one short line."""
    counts = engine.worker.counts
    parts = [f"{len(answer.token_ids) / (time.perf_counter() - begin):.1f} tokens/s"]
    if counts.num_verified:
        per_pass = counts.num_tokens / max(1, counts.num_passes)
        accepted = f"{counts.num_accepted} of {counts.num_verified} accepted"
        parts += [f"{per_pass:.2f} tokens a pass", accepted, f"draft {engine.draft.presence}"]
    return "; ".join(parts)


def _summary(generation: Generation) -> str:
    figures = generation.metrics.as_dict()
    parts = [
        f"{generation.mode}: {figures['num_tokens']} tokens ({generation.finish_reason})",
        f"{figures['tokens_per_second']:.1f} tokens/s, first after {figures['time_to_first_token_ms']:.0f} ms",
    ]
    if generation.drafter is not None:
        counts = f"{figures['num_accepted_draft_tokens']} of {figures['num_draft_tokens']}"
        parts += [
            f"drafter {generation.drafter}: {counts} candidates accepted",
            f"{figures['tokens_per_verification']:.2f} tokens a pass",
            f"target idle {percent(figures['target_idle_fraction'])}",
            f"draft idle {percent(figures['draft_idle_fraction'])}",
        ]
    return "; ".join(parts)
