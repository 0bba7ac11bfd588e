"""The inputs of a simulation, measured from the events of a run."""

from __future__ import annotations

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TypeVar

from amusd.errors import ConfigError
from amusd.simulation.cost import NOTHING, Costs, Duration, nearest
from amusd.simulation.tokens import Trace
from amusd.tracing.events import DRAFT_WORK, TARGET_WORK, DraftPrefill, DraftStep, Event, VerdictTaken, WholeSequence
from amusd.tracing.timeline import Flow, Timeline, read_timeline

Kind = TypeVar("Kind", bound=Event)


def calibrate(run_directory: Path, drafter: str) -> tuple[Costs, tuple[Trace, ...], float | None]:
    """Costs of a run, a trace for each sequence in which a draft token was compared, and `accept_next` if known.

    `drafter`: the one whose sequences count. Raises `ConfigError` if the events do not suffice.
    """
    try:
        timeline = read_timeline(run_directory)
    except (OSError, ValueError) as error:
        raise ConfigError(f"calibration={run_directory}: its events/ cannot be read ({error})") from error
    sequences = {event.sequence_id: event.drafter for event in _of_kind(WholeSequence, timeline.target)}
    drafters = sorted({name for name in sequences.values() if name is not None})
    if len(drafters) > 1 and drafter not in drafters:
        raise ConfigError(f"drafter={drafter}: calibration={run_directory} has these: {', '.join(drafters)}")
    chosen = drafter if drafter in drafters else next(iter(drafters), drafter)
    parts = timeline.by_sequence()
    kept = [parts[number] for number, name in sequences.items() if name in (None, chosen)]
    traces = tuple(trace for trace in (_trace_of(part) for part in kept if part.draft) if {*trace} - {None})
    if not run_directory.is_dir():
        raise ConfigError(f"calibration={run_directory}: no such folder")
    if not traces:
        raise ConfigError(
            f"calibration={run_directory}: its events/ show no draft token that was compared with the target's; "
            "name the run directory of generate or compare, whose draft was on the target's machine"
        )
    return _costs_of(kept), traces, _accept_next_of(kept)


# Times


def _costs_of(parts: Sequence[Timeline]) -> Costs:
    """All costs. Link times are medians, because both processes time a message."""
    target, draft = (list(chain.from_iterable(events)) for events in zip(*parts, strict=True))
    to_target = _delay(chain.from_iterable(part.to_target for part in parts), _work_of(target, "target_wait"))
    to_draft = _delay(chain.from_iterable(part.to_draft for part in parts), _work_of(draft, "draft_wait"))
    link = max((delay for delay in (to_target, to_draft) if delay is not None), default=0)
    draft_works_at, target_works_at = _work_of(draft, *DRAFT_WORK), _work_of(target, *TARGET_WORK)
    tree_steps = _durations_by(_steps([part.draft for part in parts if part.has_tree], target_works_at))
    steps = _steps([part.draft for part in parts if not part.has_tree], target_works_at)
    tokens = ((together, round(ns / num)) for num, together, ns in steps for _ in range(num))
    return Costs(
        passes=_durations_by(
            (event.num_scored, draft_works_at(event.start_ns), event.duration_ns)
            for event in chain.from_iterable(part.passes for part in parts)
        ),
        draft_token=_duration_of(tokens) or tree_steps.get(min(tree_steps, default=0), NOTHING),
        tree_steps=tree_steps,
        tree_row_ns=_slope(tree_steps),
        host=_duration_of(chain.from_iterable(map(_pauses, parts))) or NOTHING,
        target_prefill=_durations("target_prefill", target),
        draft_prefill=_durations("draft_prefill", draft),
        advance=_durations("advance", draft),
        rollback=_durations("rollback", draft),
        to_target=Duration((link if to_target is None else to_target,)),
        to_draft=Duration((link if to_draft is None else to_draft,)),
    )


def _steps(
    sequences: Sequence[Sequence[Event]], target_works_at: Callable[[int], bool]
) -> Iterator[tuple[int, bool, int]]:
    """Each draft step: number of tokens, whether the target worked, nanoseconds until the next step can start.

    The pause is the median of pairs of steps with only sent messages between.
    """
    pause = _median(
        following.start_ns - event.end_ns
        for events in sequences
        for event, following in pairwise(event for event in events if event.name != "send")
        if isinstance(event, DraftStep) and isinstance(following, DraftStep)
    )
    for step in _of_kind(DraftStep, chain.from_iterable(sequences)):
        if step.num_tokens:
            yield step.num_tokens, target_works_at(step.start_ns), step.duration_ns + (pause or 0)


def _pauses(part: Timeline) -> Iterator[tuple[bool, int]]:
    """Yield, for each pair of passes, if there is a draft and the host's time between."""
    last: Event | None = None
    waited_ns = 0
    for event in part.target:
        if event.name == "target_wait":
            waited_ns += event.duration_ns
        elif event.name == "target_pass":
            if last is not None:
                yield bool(part.draft), max(0, event.start_ns - last.end_ns - waited_ns)
            last, waited_ns = event, 0


def _work_of(events: Iterable[Event], *names: str) -> Callable[[int], bool]:
    spans = sorted((event.start_ns, event.end_ns) for event in events if event.name in names)

    def works_at(time_ns: int) -> bool:
        index = bisect.bisect_right(spans, time_ns, key=lambda span: span[0]) - 1
        return index >= 0 and time_ns < spans[index][1]

    return works_at


def _delay(flows: Iterable[Flow], waits_at: Callable[[int], bool]) -> int | None:
    """Median time of messages sent while the receiver waited; None without any."""
    return _median(received.start_ns - sent.start_ns for sent, received in flows if waits_at(sent.start_ns))


def _durations_by(samples: Iterable[tuple[int, bool, int]]) -> dict[int, Duration]:
    """Durations by a number, with the other worker at rest and at work.

    A missing situation takes the nearest number's time, or the other situation's.
    """
    found: dict[bool, dict[int, list[int]]] = {False: defaultdict(list), True: defaultdict(list)}
    for number, is_together, ns in samples:
        found[is_together][number].append(ns)

    alone, together = found[False] or found[True], found[True] or found[False]
    return {
        number: Duration(tuple(alone[nearest(alone, number)]), together=tuple(together[nearest(together, number)]))
        for number in sorted({*alone, *together})
    }


def _duration_of(samples: Iterable[tuple[bool, int]]) -> Duration | None:
    """As `_durations_by`, for one number alone; None without samples."""
    return _durations_by((0, together, ns) for together, ns in samples).get(0)


def _slope(steps: dict[int, Duration]) -> int:
    if len(steps) < 2:
        return 0
    fewest, most = min(steps), max(steps)
    difference_ms = steps[most].mean_ms - steps[fewest].mean_ms
    return max(0, round(difference_ms * 1e6 / (most - fewest)))


def _durations(name: str, events: Iterable[Event]) -> Duration:
    return Duration(tuple(event.duration_ns for event in events if event.name == name) or NOTHING.samples)


def _of_kind(kind: type[Kind], events: Iterable[Event]) -> Iterator[Kind]:
    return (event for event in events if isinstance(event, kind))


def _median(values: Iterable[int]) -> int | None:
    found = list(values)
    return int(statistics.median(found)) if found else None


# Outcomes


def _trace_of(part: Timeline) -> Trace:
    """For each position, whether the draft's own token was the target's; None if unknown.

    A pass compares tokens up to the first rejected candidate. A token committed before the draft's own arrived is
    compared by its verdict. A step without a proposal counts as wrong.
    """
    passes = part.passes
    if not passes:
        return ()
    start = passes[0].start_length
    known: dict[int, bool] = {}
    for done in passes:
        end = done.start_length + done.num_accepted
        known.update((position, True) for position in range(done.start_length, end))
        if done.num_accepted_alternatives:  # an alternative took the place of the draft's own token, which was wrong
            known[end - done.num_accepted_alternatives] = False
        if done.has_rejected:
            known[end] = False
    is_chain, base = not part.has_tree, start
    for event in part.draft:
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
    return tuple(known.get(position) for position in range(start, passes[-1].committed_length))


def _accept_next_of(parts: Sequence[Timeline]) -> float | None:
    """Probability that a further guess is right if earlier ones are wrong; None if no tree shows it.

    After a rejected candidate, the draft had the target's token if another guess was right. All further guesses are
    taken to be equally good.
    """
    trees = [part for part in parts if part.has_tree]
    hits = [hit for part in trees for hit in _hits(part)]
    if not hits:
        return None
    num_further = max(event.fan_out for part in trees for event in _of_kind(DraftPrefill, part.draft)) - 1
    return 1.0 - math.pow(1.0 - sum(hits) / len(hits), 1.0 / num_further)


def _hits(part: Timeline) -> Iterator[bool]:
    num_adopted = {verdict.committed_length: verdict.num_adopted for verdict in _of_kind(VerdictTaken, part.draft)}
    for done in part.passes:
        if done.num_accepted_alternatives:
            yield True
        if done.has_rejected and num_adopted.get(done.committed_length, 2) < 2:  # else the draft had no guess there
            yield num_adopted[done.committed_length] == 0
