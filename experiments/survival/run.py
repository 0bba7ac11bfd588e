"""How well does a run survive its draft? Kill it again and again; measure the pause and the time to its return.

Each cycle kills the draft at a random moment of an answer, waits until a candidate of the next one is accepted, and
measures plain decoding on the same prompt. Every answer has to be plain decoding's, and nothing may be left of killed
drafts.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

import argparse
import itertools
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil
import torch

from amusd.checkpoints.tokenizer import Prompt
from amusd.config import DecodingConfig, EngineConfig, SamplingParams
from amusd.console import table
from amusd.engine import Engine
from amusd.errors import ConfigError
from amusd.runtime.cores import allowed_cores, cores_for, pin_to
from amusd.runtime.draft_process import DraftSource
from amusd.tracing.events import Event, TargetPass
from amusd.tracing.recorder import Recorder
from experiments.common import Document, write_results
from experiments.plotting import run
from experiments.request import Request, parser_of

WARM_UP_CYCLES = 1
PLAIN_TOKENS = 48
"""Tokens of plain decoding that are measured after each cycle."""
RETURN_SECONDS = 120.0
"""Longest time for the next draft to come and have a candidate accepted."""
GOALS = {"pause_ms": 300.0, "attach_ms": 2000.0, "alone_of_plain": 0.95}


def main() -> None:
    """Run the script."""
    parser = parser_of("survival", __doc__, num_prompts=8, num_tokens=256)
    parser.add_argument("--cycles", type=int, default=200, help="kills and returns (default: 200; 3 with --quick)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default: 1)")
    run(parser, kill_and_measure)


def kill_and_measure(request: Request, arguments: argparse.Namespace) -> None:
    """Kill, measure, write the results. Exit code 1 if a token was wrong or anything is left behind."""
    from launch.environment import describe_environment

    machine = describe_environment()
    measured = measure(request, num_cycles=3 if request.quick else arguments.cycles, seed=arguments.seed)
    print(summary_text(measured["summary"]))
    print(f"answers that are plain decoding's: {measured['num_exact']} of {measured['num_answers']}")
    print(f"held before and after: {measured['held_before']} {measured['held_after']}; left: {measured['left']}")
    write_results(request, machine, {**measured, "seed": arguments.seed})
    if problems := problems_of(measured):
        print(*problems, sep="\n", file=sys.stderr)
        sys.exit(1)


@dataclass
class Survivor:
    """An engine, a prompt and its right answer."""

    engine: Engine
    events: list[Event]
    prompts: Sequence[Prompt]
    num_tokens: int
    expected: list[tuple[int, ...]] = field(default_factory=list)
    num_answers: int = 0
    num_exact: int = 0

    def plain(self, number: int, num_tokens: int) -> tuple[tuple[int, ...], Sequence[Event]]:
        """Tokens and events of plain decoding."""
        before = len(self.events)
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        decoding = DecodingConfig(mode="autoregressive")
        token_ids = self.engine.generate(self.prompts[number], params, decoding=decoding).token_ids
        return token_ids, self.events[before:]

    def answer(self, number: int, kill_at: int | None = None, delay: float = 0.0) -> int:
        """Answer once, killing the draft `delay` seconds after token `kill_at`; returns when in ns, or 0."""
        killed: list[int] = []
        timer = threading.Timer(delay, kill, (self.engine.draft.pid, killed))
        params = SamplingParams(max_new_tokens=self.num_tokens, ignore_eos=True)
        answer = self.engine.stream(self.prompts[number], params)
        for index, _ in enumerate(answer):
            if index == kill_at:
                timer.start()
        if kill_at is not None:
            timer.join()
        self.num_answers += 1
        self.num_exact += answer.token_ids == self.expected[number]
        return killed[0] if killed else 0

    def cycle(self, number: int, chance: random.Random) -> Document:
        """Kill the draft, wait for the next one, measure plain decoding; return the figures."""
        before = len(self.events)
        kill_at = chance.randrange(self.num_tokens // 2)
        killed_ns = self.answer(number, kill_at, chance.uniform(0.0, 0.06))  # of one and a half passes
        deadline = time.monotonic() + RETURN_SECONDS
        while (found := cycle_of(self.events[before:], killed_ns)) is None:
            if time.monotonic() >= deadline:
                raise ConfigError(f"no draft came back within {RETURN_SECONDS:g} s: {self.engine.draft.losses[-1:]}")
            self.answer(number)
        plain = ms_per_token(passes_of(self.plain(number, PLAIN_TOKENS)[1]))
        found["plain_ms_per_token"] = plain
        found["alone_of_plain"] = plain / found["alone_ms_per_token"] if found["alone_ms_per_token"] else None
        return {"prompt": number, "killed_at_token": kill_at, **found}


def kill(pid: int, killed: list[int]) -> None:
    """End the draft without warning, and note when."""
    killed.append(time.monotonic_ns())
    os.kill(pid, signal.SIGKILL)


def measure(request: Request, *, num_cycles: int, seed: int) -> Document:
    """Run all cycles with one engine."""
    if num_cycles < 1:
        raise ConfigError(f"--cycles={num_cycles}: must be at least 1")
    prompts = [prompt.turns for prompt in request.load()]
    config = EngineConfig()
    torch.set_num_threads(config.hardware.num_threads)
    recorder, events = Recorder("target"), list[Event]()
    recorder.listeners = (events.append,)
    drafts, chance = DraftSource(config), random.Random(seed)  # noqa: S311
    pin_to(cores_for("target", allowed_cores(), config.hardware))  # the draft has its own from `drafts`
    with tempfile.TemporaryDirectory(prefix="amusd-") as links:
        tempfile.tempdir = links  # all socket files go there, so that leftovers are found
        cycles = []
        with Engine.connect(config, drafts, recorder) as engine:
            pair = Survivor(engine, events, prompts, request.num_tokens)
            pair.expected = [pair.plain(number, request.num_tokens)[0] for number in range(len(prompts))]
            for number in range(WARM_UP_CYCLES):
                pair.cycle(number % len(prompts), chance)
            before = held(links)
            for number in range(num_cycles):
                cycles.append(pair.cycle(number % len(prompts), chance))
                print(f"{number + 1}/{num_cycles} {cycles[-1]}", file=sys.stderr, flush=True)
            after = held(links)
        left = {"processes": len(children()), "link_folders": len(list(Path(links).glob("amusd-*")))}
        tempfile.tempdir = None
    return {
        "cycles": cycles,
        "summary": summary_of(cycles),
        "num_answers": pair.num_answers,
        "num_exact": pair.num_exact,
        "held_before": before,
        "held_after": after,
        "left": left,
    }


# Figures of a cycle


def passes_of(events: Sequence[Event]) -> list[TargetPass]:
    """The target's passes in order."""
    return [event for event in events if isinstance(event, TargetPass)]


def neighbours(passes: Sequence[TargetPass]) -> list[tuple[TargetPass, TargetPass]]:
    """Pairs of successive passes of an answer."""
    return [(last, one) for last, one in itertools.pairwise(passes) if last.sequence_id == one.sequence_id]


def longest_pause(passes: Sequence[TargetPass]) -> int:
    """Longest time between two passes of an answer in nanoseconds; 0 without any."""
    return max((one.start_ns - last.end_ns for last, one in neighbours(passes)), default=0)


def ms_per_token(passes: Sequence[TargetPass], *, left_out_ns: int = 0) -> float | None:
    """Time from the end of one pass to the end of the next of the same answer, per token; None without any."""
    pairs = neighbours(passes)
    ns = sum(one.end_ns - last.end_ns for last, one in pairs) - left_out_ns
    num_tokens = sum(one.num_tokens for _, one in pairs)
    return ns / 1e6 / num_tokens if num_tokens else None


def cycle_of(events: Sequence[Event], killed_ns: int) -> Document | None:
    """Figures of one kill from the target's events; None while no candidate of the next draft was accepted."""
    passes = passes_of(events)
    lost_ns = _first(events, "draft_lost", killed_ns)
    back_ns = None if lost_ns is None else _first(events, "draft_back", lost_ns)
    if lost_ns is None or back_ns is None:
        return None
    helped = next((one for one in passes if one.start_ns > back_ns and one.num_accepted), None)
    if helped is None:
        return None
    around = [one for one in passes if one.end_ns > killed_ns and one.start_ns <= helped.start_ns]
    around = [one for one in passes if one.end_ns <= killed_ns][-1:] + around
    alone = [one for one in passes if one.start_ns > lost_ns and one.end_ns <= helped.start_ns]
    return {
        "pause_ms": longest_pause(around) / 1e6,
        "notice_ms": (lost_ns - killed_ns) / 1e6,
        "away_ms": (back_ns - lost_ns) / 1e6,
        "attach_ms": (helped.end_ns - back_ns) / 1e6,
        "alone_ms_per_token": ms_per_token(alone, left_out_ns=longest_pause(alone)),
    }


def _first(events: Sequence[Event], name: str, after_ns: int) -> int | None:
    return next((event.start_ns for event in events if event.name == name and event.start_ns >= after_ns), None)


# Open resources


def held(links: str) -> dict[str, int]:
    """Counts of open resources of this process; no cycle may add to them."""
    process, maps = psutil.Process(), Path("/proc/self/maps").read_text(encoding="utf-8")
    return {
        "descriptors": process.num_fds(),
        "sockets": len(process.net_connections("all")),
        "shared_memory_maps": maps.count("memfd:") + maps.count("/dev/shm/"),  # noqa: S108 - looked at
        "link_folders": len(list(Path(links).glob("amusd-*"))),
        "processes": len(children()),
        "threads": threading.active_count(),
    }


def children() -> list[psutil.Process]:
    """The children of this process, with those that have ended but were not waited for."""
    return psutil.Process().children()


# The summary


def summary_of(cycles: Sequence[Document]) -> Document:
    """For each quantity: median, 90th percentile, worst, and the number of cycles that reach its goal."""
    found = {}
    for name in ("pause_ms", "notice_ms", "away_ms", "attach_ms", "alone_of_plain"):
        is_floor = name == "alone_of_plain"
        values = sorted((one[name] for one in cycles if one[name] is not None), reverse=is_floor)
        if not values:
            continue
        goal = GOALS.get(name)
        found[name] = {
            "num_cycles": len(values),
            "median": statistics.median(values),
            "p90": values[min(len(values) - 1, int(0.9 * len(values)))],
            "worst": values[-1],
            "goal": goal,
            "num_reached": None
            if goal is None
            else sum((value >= goal) if is_floor else (value <= goal) for value in values),
        }
    return found


def problems_of(measured: Document) -> list[str]:
    """Lines about what must not happen on any machine."""
    problems = []
    if measured["num_exact"] != measured["num_answers"]:
        problems.append(f"{measured['num_answers'] - measured['num_exact']} answers are not plain decoding's")
    problems += [
        f"{name}: {measured['held_before'][name]} before, {after} after"
        for name, after in measured["held_after"].items()
        if after > measured["held_before"][name]
    ]
    return problems + [
        f"{name} left when the engine was closed: {number}" for name, number in measured["left"].items() if number
    ]


def summary_text(summary: Document) -> str:
    """A table with a line for each quantity."""
    lines = [
        (
            name,
            *(f"{row[column]:.2f}" for column in ("median", "p90", "worst")),
            "" if row["goal"] is None else f"{row['goal']:g}",
            "" if row["goal"] is None else f"{row['num_reached']}/{row['num_cycles']}",
        )
        for name, row in summary.items()
    ]
    return table(("", "median", "p90", "worst", "goal", "reached"), lines)


if __name__ == "__main__":
    main()
