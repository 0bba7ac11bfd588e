"""Inputs read back from events: what was put in comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from lines import refusal
from simulation.builders import PLAIN, chain, of_answers, synchronous, write_run

from amusd.config import DecodingConfig
from amusd.simulation.calibration import calibrate
from amusd.simulation.cost import Costs, Duration
from amusd.simulation.simulator import Simulator
from amusd.simulation.tokens import Trace, drawn_answers


def ms(alone: float, together: float | None = None) -> Duration:
    return Duration((round(1e6 * alone),), together=() if together is None else (round(1e6 * together),))


COSTS = Costs(
    passes={0: ms(10.0, 11.0), 4: ms(12.0, 13.0)},
    draft_token=ms(1.5, 1.7), host=ms(0.2, 0.4), target_prefill=ms(20.0), draft_prefill=ms(5.0),
    advance=ms(0.05), rollback=ms(0.1), to_target=ms(0.08), to_draft=ms(0.06),
)  # fmt: skip


def machine() -> Simulator:
    return of_answers(drawn_answers(0.7, num_answers=3, num_tokens=100, seed=2), COSTS, max_candidates=7)


def measured(folder: Path, simulator: Simulator, *schedules: DecodingConfig) -> tuple[Costs, Sequence[Trace]]:
    write_run(folder, simulator, *schedules)
    return calibrate(folder, "embedded")[:2]


def test_the_times_that_went_in_come_out(tmp_path: Path) -> None:
    found, _ = measured(tmp_path, machine(), PLAIN, synchronous(4), chain(2))
    for width, (alone, together) in {0: (10_000_000, 11_000_000), 4: (12_000_000, 13_000_000)}.items():
        assert set(found.passes[width].samples) == {alone}
        assert set(found.passes[width].together) == {together}
    assert set(found.draft_token.samples) == {1_500_000}
    assert set(found.draft_token.together) == {1_700_000}
    assert (set(found.host.samples), set(found.host.together)) == ({200_000}, {400_000})
    for name in ("target_prefill", "draft_prefill", "advance", "rollback", "to_target", "to_draft"):
        assert set(getattr(found, name).samples) == set(getattr(COSTS, name).samples), name


def test_outcomes_are_seen_as_they_were(tmp_path: Path) -> None:
    simulator = machine()
    _, traces = measured(tmp_path, simulator, PLAIN, chain(3))
    for trace, answer in zip(traces, simulator.answers, strict=True):
        assert all(known in (None, right) for known, right in zip(trace, answer, strict=True))
    assert sum(known is None for trace in traces for known in trace) < 0.2 * 300


def test_a_run_that_says_too_little_is_refused_in_one_line(tmp_path: Path) -> None:
    (events := tmp_path / "events").mkdir()
    dataclasses.replace(machine(), answers=((True,),)).run(synchronous(1), events)
    assert "no draft token that was compared" in refusal(lambda: calibrate(tmp_path, "embedded"))
