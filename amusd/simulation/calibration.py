"""The inputs of a simulation, measured from the events of a run."""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from amusd.errors import ConfigError
from amusd.simulation.cost import NOTHING, Costs, Duration
from amusd.simulation.outcomes import accept_next_of, trace_of
from amusd.simulation.tokens import Trace, trace_rate
from amusd.tracing.drafted import drafts_tree
from amusd.tracing.events import (
    DRAFT_WORK,
    TARGET_WORK,
    Advance,
    DraftPrefill,
    DraftStep,
    DraftWait,
    Event,
    Rollback,
    Send,
    TargetPass,
    TargetPrefill,
    TargetWait,
    WholeSequence,
)  # fmt: skip
from amusd.tracing.messages import Flow
from amusd.tracing.timeline import Timeline, by_sequence, read_timeline

Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The costs and outcomes that a run has shown."""

    costs: Costs
    traces: tuple[Trace, ...]
    """One for each sequence in which a draft token was compared."""
    accept_next: float | None = None
    """Probability that a further guess of a tree is right if those before it are wrong; None if unknown."""


def calibrate(run_directory: Path, drafter: str) -> Calibration:
    """Read a run. Raises `ConfigError` if its events do not suffice.

    `drafter`: the one that counts.
    """
    try:
        timeline = read_timeline(run_directory)
    except ValueError as error:
        raise ConfigError(f"calibration={run_directory}: its events/ cannot be read ({error})") from error
    sequences = {event.sequence_id: event.drafter for event in timeline.target if isinstance(event, WholeSequence)}
    drafters = sorted({name for name in sequences.values() if name is not None})
    if len(drafters) > 1 and drafter not in drafters:
        raise ConfigError(f"drafter={drafter}: calibration={run_directory} has these: {', '.join(drafters)}")
    chosen = drafter if drafter in drafters else next(iter(drafters), drafter)
    kept = {number for number, name in sequences.items() if name in (None, chosen)}
    target = {number: events for number, events in by_sequence(timeline.target).items() if number in kept}
    draft = {number: events for number, events in by_sequence(timeline.draft).items() if number in kept}
    pairs = [(events, draft[number]) for number, events in target.items() if number in draft]
    traces = tuple(trace for trace in (trace_of(*pair) for pair in pairs) if trace_rate(trace) is not None)
    if not traces:
        raise ConfigError(
            f"calibration={run_directory}: its events/ show no draft token that was compared with the target's; "
            "name the run directory of generate or compare, whose draft was on the target's machine"
        )
    measured = _Measured(target, draft, timeline)
    return Calibration(measured.costs(), traces, accept_next_of(pairs))


@dataclass(frozen=True, slots=True)
class _Measured:
    """The events of both workers by sequence, and the times that they show."""

    target: dict[int, list[Event]]
    draft: dict[int, list[Event]]
    timeline: Timeline

    def costs(self) -> Costs:
        """All times. Link times are medians, because both processes time a message."""
        to_target = _delay(self.timeline.to_target, self.target, TargetWait)
        to_draft = _delay(self.timeline.to_draft, self.draft, DraftWait)
        link = max((delay for delay in (to_target, to_draft) if delay is not None), default=0)
        draft_works_at = _work_of(self.draft, DRAFT_WORK)
        trees = [events for events in self.draft.values() if drafts_tree(events)]
        chains = [events for events in self.draft.values() if not drafts_tree(events)]
        tree_steps = _durations_by(self._steps(trees))
        tokens = ((1, together, round(ns / num)) for num, together, ns in self._steps(chains) for _ in range(num))
        return Costs(
            passes=_durations_by(
                (event.num_scored, draft_works_at(event.start_ns), event.duration_ns)
                for event in _of_kind(self.target, TargetPass)
            ),
            draft_token=_durations_by(tokens).get(1) or tree_steps.get(min(tree_steps, default=0), NOTHING),
            tree_steps=tree_steps,
            tree_row_ns=_slope(tree_steps),
            host=_durations_by(self._pauses()).get(0, NOTHING),
            target_prefill=_durations(self.target, TargetPrefill),
            draft_prefill=_durations(self.draft, DraftPrefill),
            advance=_durations(self.draft, Advance),
            rollback=_durations(self.draft, Rollback),
            to_target=Duration((link if to_target is None else to_target,)),
            to_draft=Duration((link if to_draft is None else to_draft,)),
        )

    def _steps(self, sequences: Sequence[Sequence[Event]]) -> Iterator[tuple[int, bool, int]]:
        """Each draft step: its tokens, whether the target worked meanwhile, nanoseconds until the next can start.

        The pause between two steps is measured where no message lies between them.
        """
        target_works_at = _work_of(self.target, TARGET_WORK)
        pause = _median(
            following.start_ns - event.end_ns
            for events in sequences
            for event, following in pairwise(event for event in events if not isinstance(event, Send))
            if isinstance(event, DraftStep) and isinstance(following, DraftStep)
        )
        for step in (event for events in sequences for event in events if isinstance(event, DraftStep)):
            if step.num_tokens:
                together = target_works_at(step.start_ns)
                yield step.num_tokens, together, step.duration_ns + (pause or 0)

    def _pauses(self) -> Iterator[tuple[int, bool, int]]:
        """The host's time between two passes, waits not counted; whether there was a draft."""
        for number, events in self.target.items():
            last: Event | None = None
            waited_ns = 0
            for event in events:
                if isinstance(event, TargetWait):
                    waited_ns += event.duration_ns
                elif isinstance(event, TargetPass):
                    if last is not None:
                        yield 0, number in self.draft, max(0, event.start_ns - last.end_ns - waited_ns)
                    last, waited_ns = event, 0


def _work_of(events: dict[int, list[Event]], kinds: tuple[type[Event], ...]) -> Callable[[int], bool]:
    chosen = (event for sequence in events.values() for event in sequence if isinstance(event, kinds))
    spans = sorted((event.start_ns, event.end_ns) for event in chosen)

    def works_at(time_ns: int) -> bool:
        index = bisect.bisect_right(spans, time_ns, key=lambda span: span[0]) - 1
        return index >= 0 and time_ns < spans[index][1]

    return works_at


def _delay(flows: Sequence[Flow], receiver: dict[int, list[Event]], wait: type[Event]) -> int | None:
    """Median time of messages sent while the receiver waited; None without any."""
    waits_at = _work_of(receiver, (wait,))
    return _median(flow.received.start_ns - flow.sent.start_ns for flow in flows if waits_at(flow.sent.start_ns))


def _durations_by(samples: Iterable[tuple[int, bool, int]]) -> dict[int, Duration]:
    """Nanoseconds by a number, with the other worker at rest (False) and at work.

    A missing situation takes the nearest number's time, or the other situation's.
    """
    found: dict[bool, dict[int, list[int]]] = {False: defaultdict(list), True: defaultdict(list)}
    for number, together, ns in samples:
        found[together][number].append(ns)

    def nearest(number: int, *, together: bool) -> tuple[int, ...]:
        measured = found[together] or found[not together]
        return tuple(measured[min(measured, key=lambda known: (abs(known - number), known))])

    numbers = sorted(set(found[False]) | set(found[True]))
    return {n: Duration(nearest(n, together=False), together=nearest(n, together=True)) for n in numbers}


def _slope(steps: dict[int, Duration]) -> int:
    if len(steps) < 2:
        return 0
    fewest, most = min(steps), max(steps)
    difference_ms = steps[most].mean_ms - steps[fewest].mean_ms
    return max(0, round(difference_ms * 1e6 / (most - fewest)))


def _durations(events: dict[int, list[Event]], kind: type[Event]) -> Duration:
    samples = tuple(event.duration_ns for event in _of_kind(events, kind))
    return Duration(samples) if samples else NOTHING


def _of_kind(events: dict[int, list[Event]], kind: type[Kind]) -> Iterator[Kind]:
    return (event for sequence in events.values() for event in sequence if isinstance(event, kind))


def _median(values: Iterable[int]) -> int | None:
    found = list(values)
    return int(statistics.median(found)) if found else None
