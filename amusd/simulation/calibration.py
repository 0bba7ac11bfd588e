"""The inputs of a simulation, measured: times and outcomes from the events of a run."""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from amusd.errors import ConfigError
from amusd.simulation.cost import NOTHING, Costs, Duration, Shared
from amusd.simulation.tokens import Trace, trace_rate
from amusd.simulation.tree_calibration import accept_next_of
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
    VerdictTaken,
    WholeSequence,
)  # fmt: skip
from amusd.tracing.messages import Flow
from amusd.tracing.timeline import Timeline, by_sequence, read_timeline

Kind = TypeVar("Kind", bound=Event)


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a run has shown."""

    costs: Costs
    traces: tuple[Trace, ...]
    """One for each sequence with the draft of which at least one token was compared."""
    drafter: str
    accept_next: float | None = None
    """Of a draft that makes several guesses: how likely each further one is right where those before it are wrong. None
    where no tree of the run shows it."""

    @property
    def acceptance(self) -> float:
        """Share of right tokens among all that were compared."""
        return statistics.fmean(outcome for trace in self.traces for outcome in trace if outcome is not None)

    @property
    def known_fraction(self) -> float:
        """Share of positions whose draft token was compared."""
        return statistics.fmean(outcome is not None for trace in self.traces for outcome in trace)


def calibrate(run_directory: Path, drafter: str, key: str = "calibration") -> Calibration:
    """Read a run. `drafter`: which one counts, where the run had several. `key`: what named the run, for errors.

    Raises `ConfigError` when the run's events do not tell what a simulation has to know.
    """
    try:
        timeline = read_timeline(run_directory)
    except ValueError as error:
        raise ConfigError(f"{key}={run_directory}: its events/ cannot be read ({error})") from error
    sequences = {event.sequence_id: event.drafter for event in timeline.target if isinstance(event, WholeSequence)}
    drafters = sorted({name for name in sequences.values() if name is not None})
    if len(drafters) > 1 and drafter not in drafters:
        raise ConfigError(f"drafter={drafter}: {key}={run_directory} has these: {', '.join(drafters)}")
    chosen = drafter if drafter in drafters else next(iter(drafters), drafter)
    kept = {number for number, name in sequences.items() if name in (None, chosen)}
    target = {number: events for number, events in by_sequence(timeline.target).items() if number in kept}
    draft = {number: events for number, events in by_sequence(timeline.draft).items() if number in kept}
    found = (_trace(events, draft[number]) for number, events in target.items() if number in draft)
    traces = tuple(trace for trace in found if trace_rate(trace) is not None)
    if not traces:
        raise ConfigError(
            f"{key}={run_directory}: its events/ show no draft token that was compared with the target's; "
            "name the run directory of generate or compare"
        )
    measured = _Measured(target, draft, timeline)
    accept_next = accept_next_of((target[number], draft[number]) for number in target if number in draft)
    return Calibration(measured.costs(), traces, chosen, accept_next)


def _trace(events: Sequence[Event], draft: Sequence[Event]) -> Trace:
    """Which of the draft's own tokens were the target's, from the events of one sequence.

    A pass says it of the candidates up to the first rejected one; a token committed before the draft's own arrived is
    compared by the draft when its verdict comes. Where a draft had nothing to propose (a lookup that found nothing) it
    was not right.
    """
    passes = [event for event in events if isinstance(event, TargetPass)]
    if not passes:
        return ()
    committed = start = passes[0].start_length
    known: dict[int, bool] = {}
    for done in passes:
        known.update((committed + i, True) for i in range(done.num_accepted))
        if done.num_rescued:  # in place of the draft's own token, which was wrong
            known[committed + done.num_accepted - done.num_rescued] = False
        if done.has_rejected:
            known[committed + done.num_accepted] = False
        committed = done.committed_length
    is_chain, base = not drafts_tree(draft), start
    for event in draft:
        if isinstance(event, DraftPrefill):
            base = event.num_tokens
        elif isinstance(event, DraftStep) and not event.num_tokens:
            known.setdefault(event.length, False)
        elif isinstance(event, VerdictTaken) and is_chain:
            for position in range(base, event.kept_length):
                known.setdefault(position, True)
            if event.num_discarded:
                known.setdefault(event.kept_length, False)
            base = event.committed_length
    return tuple(known.get(position) for position in range(start, committed))


@dataclass(frozen=True, slots=True)
class _Measured:
    """The events of both workers, by sequence, and what can be read off them."""

    target: dict[int, list[Event]]
    draft: dict[int, list[Event]]
    timeline: Timeline

    def costs(self) -> Costs:
        """All times; those of the link are medians, because a message is timed in both processes at once."""
        host = self._host()
        before = _median(self._before_verdict())
        host_ns = statistics.median(host.together.samples)
        to_target = _delay(self.timeline.to_target, self.target, TargetWait)
        to_draft = _delay(self.timeline.to_draft, self.draft, DraftWait)
        found = [delay for delay in (to_target, to_draft) if delay is not None]
        link = max(found, default=0)
        trees = [events for events in self.draft.values() if drafts_tree(events)]
        chains = [events for events in self.draft.values() if not drafts_tree(events)]
        tree_steps = self._tree_steps(trees)
        only_trees = tree_steps and not any(isinstance(event, DraftStep) for events in chains for event in events)
        return Costs(
            passes=self._passes(),
            draft_token=tree_steps[min(tree_steps)] if only_trees else self._draft_token(chains),
            tree_steps=tree_steps,
            tree_row_ns=_slope(tree_steps),
            host=host,
            host_before_verdict=min(1.0, before / host_ns) if host_ns and before is not None else 1.0,
            target_prefill=_durations(self.target, TargetPrefill),
            draft_prefill=_durations(self.draft, DraftPrefill),
            advance=_durations(self.draft, Advance),
            rollback=_durations(self.draft, Rollback),
            to_target=Duration((link if to_target is None else to_target,)),
            to_draft=Duration((link if to_draft is None else to_draft,)),
        )

    def _passes(self) -> dict[int, Shared]:
        """By number of candidates; what was not measured is that of the nearest number, then of the other situation."""
        draft_work = _Spans(self.draft, DRAFT_WORK)
        found: dict[bool, dict[int, list[int]]] = {False: defaultdict(list), True: defaultdict(list)}
        for event in _of_kind(self.target, TargetPass):
            found[draft_work.contain(event.start_ns)][event.num_scored].append(event.duration_ns)

        def nearest(number: int, *, together: bool) -> Duration:
            measured = found[together] or found[not together]
            return Duration(tuple(measured[min(measured, key=lambda known: (abs(known - number), known))]))

        numbers = sorted(set(found[False]) | set(found[True]))
        return {n: Shared(nearest(n, together=False), nearest(n, together=True)) for n in numbers}

    def _draft_token(self, chains: Sequence[Sequence[Event]]) -> Shared:
        """Per token, with the draft's own time between two steps. Steps without a proposal are left out."""
        found: dict[bool, list[int]] = {False: [], True: []}
        for num_tokens, together, ns in self._steps(chains):
            found[together] += [round(ns / num_tokens)] * num_tokens
        return _shared(found)

    def _tree_steps(self, trees: Sequence[Sequence[Event]]) -> dict[int, Shared]:
        """By number of nodes, likewise."""
        found: dict[int, dict[bool, list[int]]] = defaultdict(lambda: {False: [], True: []})
        for num_nodes, together, ns in self._steps(trees):
            found[num_nodes][together].append(ns)
        return {num_nodes: _shared(times) for num_nodes, times in sorted(found.items())}

    def _steps(self, sequences: Sequence[Sequence[Event]]) -> Iterator[tuple[int, bool, int]]:
        """Of each draft step: how many tokens, whether the target worked meanwhile, how long until the next can start.

        Between two steps without a message between them the draft had room to go on.
        """
        target_work = _Spans(self.target, TARGET_WORK)
        pause = _median(
            following.start_ns - event.end_ns
            for events in sequences
            for event, following in pairwise(event for event in events if not isinstance(event, Send))
            if isinstance(event, DraftStep) and isinstance(following, DraftStep)
        )
        for step in (event for events in sequences for event in events if isinstance(event, DraftStep)):
            if step.num_tokens:
                together = target_work.contain(step.start_ns)
                yield step.num_tokens, together, step.duration_ns + (pause or 0)

    def _host(self) -> Shared:
        """From one pass to the next, less what was spent waiting: without a draft, and with one."""
        found: dict[bool, list[int]] = {False: [], True: []}
        for number, events in self.target.items():
            last: Event | None = None
            waited_ns = 0
            for event in events:
                if isinstance(event, TargetWait):
                    waited_ns += event.duration_ns
                elif isinstance(event, TargetPass):
                    if last is not None:
                        found[number in self.draft].append(max(0, event.start_ns - last.end_ns - waited_ns))
                    last, waited_ns = event, 0
        return _shared(found)

    def _before_verdict(self) -> Iterator[int]:
        """From the end of a pass to the sending of its verdict."""
        for events in self.target.values():
            last: Event | None = None
            for event in events:
                if isinstance(event, TargetPass):
                    last = event
                elif isinstance(event, Send) and event.message == "verdict" and last is not None:
                    yield event.start_ns - last.end_ns


class _Spans:
    """When a worker worked: the simulation asks the same when a pass or step begins."""

    def __init__(self, events: dict[int, list[Event]], kinds: tuple[type[Event], ...]) -> None:
        chosen = (event for sequence in events.values() for event in sequence if isinstance(event, kinds))
        self._spans = sorted((event.start_ns, event.end_ns) for event in chosen)

    def contain(self, time_ns: int) -> bool:
        """Whether the worker worked at that time."""
        index = bisect.bisect_right(self._spans, time_ns, key=lambda span: span[0]) - 1
        return index >= 0 and time_ns < self._spans[index][1]


def _delay(flows: Sequence[Flow], receiver: dict[int, list[Event]], wait: type[Event]) -> int | None:
    """Median time of the messages that were sent while the receiver was waiting for one; None without any."""
    waits = {number: [event for event in events if isinstance(event, wait)] for number, events in receiver.items()}
    found = []
    for flow in flows:
        own = waits.get(flow.sent.sequence_id, [])
        index = bisect.bisect_right(own, flow.sent.start_ns, key=lambda event: event.start_ns) - 1
        if index >= 0 and flow.sent.start_ns < own[index].end_ns:
            found.append(flow.latency_ns)
    return _median(found)


def _shared(found: dict[bool, list[int]]) -> Shared:
    """Times with the other worker at rest and at work; where one was never seen, those of the other."""
    alone, together = found[False] or found[True] or [0], found[True] or found[False] or [0]
    return Shared(Duration(tuple(alone)), Duration(tuple(together)))


def _slope(steps: dict[int, Shared]) -> int:
    """What one node adds, between the fewest and the most that were measured; 0 where that shows nothing."""
    if len(steps) < 2:
        return 0
    fewest, most = min(steps), max(steps)
    difference_ms = steps[most].alone.mean_ms - steps[fewest].alone.mean_ms
    return max(0, round(difference_ms * 1e6 / (most - fewest)))


def _durations(events: dict[int, list[Event]], kind: type[Event]) -> Duration:
    samples = tuple(event.duration_ns for event in _of_kind(events, kind))
    return Duration(samples) if samples else NOTHING


def _of_kind(events: dict[int, list[Event]], kind: type[Kind]) -> Iterator[Kind]:
    return (event for sequence in events.values() for event in sequence if isinstance(event, kind))


def _median(values: Iterable[int]) -> int | None:
    found = list(values)
    return int(statistics.median(found)) if found else None
