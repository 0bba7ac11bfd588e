"""How well does a run survive its draft? Kill it again and again; measure the pause and the time to its return.

Each cycle kills the draft at a random moment of an answer, waits until a candidate of the next one is accepted, and
measures plain decoding on the same prompt. Every answer has to be plain decoding's, and nothing may be left of the
dead.
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
"""Of plain decoding, measured behind each cycle."""
RETURN_SECONDS = 120.0
"""Longest that a draft may take to come back and be of use."""
GOALS = {"pause_ms": 300.0, "attach_ms": 2000.0, "alone_of_plain": 0.95}


def main() -> None:
    """Run the script."""
    parser = parser_of("survival", __doc__, num_prompts=8, num_tokens=256)
    parser.add_argument("--cycles", type=int, default=200, help="kills and returns (default: 200; 3 with --quick)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default: 1)")
    run(parser, kill_and_measure)


def kill_and_measure(request: Request, arguments: argparse.Namespace) -> None:
    """Kill, measure, write what came out; exit code 1 where a token was wrong or something was left."""
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
    """An engine, what it is asked, and what it should say."""

    engine: Engine
    events: list[Event]
    prompts: Sequence[Prompt]
    num_tokens: int
    expected: list[tuple[int, ...]] = field(default_factory=list)
    num_answers: int = 0
    num_exact: int = 0

    def plain(self, number: int, num_tokens: int) -> tuple[tuple[int, ...], Sequence[Event]]:
        """Plain decoding's tokens, and the events of it."""
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
        """Kill, wait for the return, measure plain decoding; what it took."""
        before = len(self.events)
        kill_at = chance.randrange(self.num_tokens // 2)
        killed_ns = self.answer(number, kill_at, chance.uniform(0.0, 0.06))  # a pass and a half
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
    """All cycles, with one engine."""
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
        tempfile.tempdir = links  # socket files go nowhere else, so that what stays behind is seen
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


# What a cycle took


def passes_of(events: Sequence[Event]) -> list[TargetPass]:
    """The target's, in order."""
    return [event for event in events if isinstance(event, TargetPass)]


def neighbours(passes: Sequence[TargetPass]) -> list[tuple[TargetPass, TargetPass]]:
    """Each two passes of an answer that follow each other."""
    return [(last, one) for last, one in itertools.pairwise(passes) if last.sequence_id == one.sequence_id]


def longest_pause(passes: Sequence[TargetPass]) -> int:
    """Nanoseconds between two passes of an answer; 0 where there are none."""
    return max((one.start_ns - last.end_ns for last, one in neighbours(passes)), default=0)


def ms_per_token(passes: Sequence[TargetPass], *, left_out_ns: int = 0) -> float | None:
    """From the end of one pass to that of the next of the same answer; None where there are none."""
    pairs = neighbours(passes)
    ns = sum(one.end_ns - last.end_ns for last, one in pairs) - left_out_ns
    num_tokens = sum(one.num_tokens for _, one in pairs)
    return ns / 1e6 / num_tokens if num_tokens else None


def cycle_of(events: Sequence[Event], killed_ns: int) -> Document | None:
    """What the target's events say of one kill; None while no candidate of the next draft has been accepted."""
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


# What is held


def held(links: str) -> dict[str, int]:
    """What this process has open, which a cycle must not add to."""
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
    """All that this process has started and that are still there, dead ones that nobody has waited for included."""
    return psutil.Process().children()


# What it comes to


def summary_of(cycles: Sequence[Document]) -> Document:
    """Of each quantity: median, the worst tenth begins, worst; and how many of the cycles reach its goal."""
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
    """What must not be, whatever the machine is like."""
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
    """A line for each quantity."""
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
