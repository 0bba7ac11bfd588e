"""What a slow, stalled, cancelled or long neighbour costs the other answers of one engine.

    python experiments/slow_neighbour/run.py

Some answers are computed at a time; the last one is the neighbour, and the others' times are taken. First the neighbour
is read like the others. Then it is never read, or its candidates never arrive, or its prompt is long, or it is one
short answer after another, which end or are cancelled. The cases take turns in every round. None may change a token of
the others.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `amusd` can be imported from anywhere

from amusd.answer import Answer
from amusd.config import DecodingConfig, SamplingParams, WorkloadConfig
from amusd.console import table
from amusd.engine import Engine
from amusd.protocol.messages import Candidate, Message, Open
from amusd.tracing.events import Event
from amusd.transport.base import Transport
from amusd.types import Mode
from amusd.workload import load_prompts
from experiments.common import run, write_results
from experiments.request import ROOT, Request

CASES = {
    "read": "read",
    "never read": "read",
    "no candidates": "read",
    "long prompt": "read",
    "short answers": "read",
    "cancelled": "short answers",
}
"""What the neighbour is, and what it is compared with: one that is cancelled does the work of a short answer."""
NUM_PROMPTS = 10_000
"""More than the package has: all of them."""
SHORT = 8
"""Tokens of a short answer."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    num_sequences: int = 4
    num_tokens: int = 96
    """Tokens of each of the others."""
    long_prompt: int = 1024
    """Tokens of the neighbour's prompt where that is long."""
    num_rounds: int = 5
    decoding: DecodingConfig


@dataclass(frozen=True)
class Times:
    """The others' times in one run."""

    gaps_ms: list[float]
    """Between two passes over the same answer."""
    ms_per_token: float


@dataclass(frozen=True)
class Row:
    """One line of the table: of all rounds, and how many times as long as in the case that it is compared with."""

    temperature: float
    case: str
    p50_ms: float
    p99_ms: float
    longest_ms: float
    tokens_per_second: float
    p50_ratio: float
    p99_ratio: float
    token_ratio: float
    """The ratio of the mean times per token."""
    are_identical: bool
    """The others have the same tokens as beside a neighbour that is read."""


class Withholding:
    """A link that loses the candidates of the answer to one prompt."""

    def __init__(self, link: Transport) -> None:
        self._link = link
        self.prompt: tuple[int, ...] | None = None
        """The prompt of the answer whose candidates are lost."""
        self._lost: set[int] = set()
        self.num_lost = 0
        self.close, self.frames, self.address = link.close, link.frames, link.address

    def send(self, message: Message) -> None:
        """See `Transport`."""
        if isinstance(message, Open) and message.token_ids == self.prompt:
            self._lost.add(message.sequence_id)
        self._link.send(message)

    def receive(self, timeout: float) -> Message | None:
        """See `Transport`; a lost message ends the wait early, as one of no use does."""
        message = self._link.receive(timeout)
        while isinstance(message, Candidate) and message.sequence_id in self._lost:
            self.num_lost += 1
            message = self._link.receive(0.0)
        return message


def main() -> None:
    """Read the command line, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="embedded", help="embedded, or a folder of a checkpoint")
    parser.add_argument("--drafter", default="embedded", help="embedded, ngram, or a folder of a checkpoint")
    parser.add_argument("--mode", default="asynchronous", choices=[mode.value for mode in Mode])
    parser.add_argument("--sequences", type=int, default=Settings.num_sequences, help="answers at a time")
    parser.add_argument("--tokens", type=int, default=Settings.num_tokens, help="tokens of each of the others")
    parser.add_argument("--long", type=int, default=Settings.long_prompt, help="tokens of the long prompt")
    parser.add_argument("--rounds", type=int, default=Settings.num_rounds)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--max-num-batched-tokens", type=int, help="prompt tokens of a step")
    parser.add_argument("--out", type=Path, help="file for the results, with the commit and the machine")
    arguments = parser.parse_args()
    settings = Settings(
        num_sequences=arguments.sequences,
        num_tokens=arguments.tokens,
        long_prompt=arguments.long,
        num_rounds=arguments.rounds,
        decoding=DecodingConfig(mode=Mode(arguments.mode)),
    )
    engine = Engine.launch(
        target=arguments.target,
        drafter=arguments.drafter,
        max_num_seqs=arguments.sequences,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
    )
    with engine:
        texts = [prompt.turns for prompt in load_prompts(WorkloadConfig(num_prompts=NUM_PROMPTS))]
        prompts = [engine.encode(text) for text in texts]
        rows = [
            row for temperature in arguments.temperatures for row in measure(engine, prompts, settings, temperature)
        ]
    print(text_of(rows))
    if arguments.out is not None:
        keep(rows, settings, arguments.out)


def keep(rows: Sequence[Row], settings: Settings, out: Path) -> None:
    """Write the file of results."""
    from launch.environment import describe_environment

    request = Request(
        experiment="slow_neighbour",
        prompts=None,
        num_prompts=NUM_PROMPTS,
        num_tokens=settings.num_tokens,
        quick=False,
        out=out,
        runs=ROOT / "runs",
    )
    measured = {"rows": [asdict(row) for row in rows], "num_rounds": settings.num_rounds}
    write_results(request, describe_environment(), measured)


def measure(engine: Engine, prompts: Sequence[tuple[int, ...]], settings: Settings, temperature: float) -> list[Row]:
    """A row for each case."""
    with withholding(engine) as link:
        cases = [case for case in CASES if link is not None or case != "no candidates"]
        _, expected = run_case(engine, link, prompts, settings, temperature, cases[0])  # warms up, too
        times: dict[str, list[Times]] = {case: [] for case in cases}
        changed = set()
        for number in range(settings.num_rounds):
            first = number % len(cases)
            for case in (*cases[first:], *cases[:first]):
                measured, tokens = run_case(engine, link, prompts, settings, temperature, case)
                times[case].append(measured)
                changed |= {case} if tokens != expected else set()
    return [row_of(case, temperature, times, are_identical=case not in changed) for case in cases]


@contextmanager
def withholding(engine: Engine) -> Iterator[Withholding | None]:
    """The engine keeps its events, and its link may lose candidates; None where it has no link."""
    client = engine.worker.client
    inner = client.link
    link = None if inner is None else Withholding(inner)
    client.link = link
    try:
        with patch.object(engine.worker.recorder, "flush"):  # would drop the events
            yield link
    finally:
        client.link = inner


def run_case(
    engine: Engine,
    link: Withholding | None,
    prompts: Sequence[tuple[int, ...]],
    settings: Settings,
    temperature: float,
    case: str,
) -> tuple[Times, list[list[int]]]:
    """The others' times beside one neighbour, and their tokens."""
    recorder = engine.worker.recorder
    num_seen = len(recorder.events)
    own, *far = prompts[settings.num_sequences - 1 :]
    if case == "long prompt":
        own = tuple(itertools.islice(itertools.cycle(itertools.chain(own, *far)), settings.long_prompt))
    if link is not None:
        link.prompt = own if case == "no candidates" else None

    def submit(prompt: tuple[int, ...], num_tokens: int, seed: int) -> Answer:
        params = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=num_tokens, ignore_eos=True)
        return engine.submit(prompt, params, decoding=settings.decoding)

    others = [submit(prompts[index], settings.num_tokens, index) for index in range(settings.num_sequences - 1)]
    num_own = SHORT if case == "short answers" else engine.worker.model.max_length - len(own)
    neighbour = submit(own, num_own, len(others))
    tokens: list[list[int]] = [[] for _ in others]
    num_read = 0  # tokens of the neighbour
    while all(len(read) < settings.num_tokens for read in tokens):
        for answer, read in zip(others, tokens, strict=True):
            read.append(next(answer).token_id)
        if case != "never read":
            next(neighbour)
            num_read += 1
        if case in ("short answers", "cancelled") and num_read % SHORT == 0:
            neighbour.close()
            neighbour = submit(own, num_own, len(others))
    neighbour.close()
    for answer in others:
        answer.close()
    return times_of(recorder.events[num_seen:], len(others)), tokens


def times_of(events: Sequence[Event], num_others: int) -> Times:
    """The times of the answers that began first, while all of them were computed."""
    ends: dict[int, list[tuple[int, int]]] = {}
    for event in events:
        if event.name == "target_pass":
            ends.setdefault(event.sequence_id, []).append((event.end_ns, event.fields["num_tokens"]))
    passes = [ends[number] for number in sorted(ends)[:num_others]]
    begin_ns, end_ns = max(own[0][0] for own in passes), min(own[-1][0] for own in passes)
    within = [[(at_ns, number) for at_ns, number in own if begin_ns <= at_ns <= end_ns] for own in passes]
    gaps_ns = [later[0] - earlier[0] for own in within for earlier, later in itertools.pairwise(own)]
    num_tokens = sum(number for own in within for _, number in own[1:])
    return Times([gap / 1e6 for gap in gaps_ns], sum(gaps_ns) / 1e6 / num_tokens)


def row_of(case: str, temperature: float, times: Mapping[str, Sequence[Times]], *, are_identical: bool) -> Row:
    """A line from the runs of all cases."""
    base = times[CASES[case]]

    def ratio(value: Callable[[Times], float]) -> float:
        """The median over the rounds."""
        return statistics.median(value(own) / value(other) for own, other in zip(times[case], base, strict=True))

    gaps = [gap for own in times[case] for gap in own.gaps_ms]
    return Row(
        temperature=temperature,
        case=case,
        p50_ms=quantile(gaps, 0.5),
        p99_ms=quantile(gaps, 0.99),
        longest_ms=max(gaps),
        tokens_per_second=statistics.median(1e3 / own.ms_per_token for own in times[case]),
        p50_ratio=ratio(lambda one: quantile(one.gaps_ms, 0.5)),
        p99_ratio=ratio(lambda one: quantile(one.gaps_ms, 0.99)),
        token_ratio=ratio(lambda one: one.ms_per_token),
        are_identical=are_identical,
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def text_of(rows: Sequence[Row]) -> str:
    """The table for people."""
    header = (
        "neighbour",
        "T",
        "p50 ms",
        "p99 ms",
        "longest",
        "tokens/s each",
        "p50",
        "p99",
        "per token",
        "same tokens",
    )
    lines = [
        (
            row.case,
            f"{row.temperature:g}",
            *(f"{value:.1f}" for value in (row.p50_ms, row.p99_ms, row.longest_ms, row.tokens_per_second)),
            *(f"{ratio:.3f}" for ratio in (row.p50_ratio, row.p99_ratio, row.token_ratio)),
            "yes" if row.are_identical else "NO",
        )
        for row in rows
    ]
    return table(header, lines)


if __name__ == "__main__":
    run(main)
