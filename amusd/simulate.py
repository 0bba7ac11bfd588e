"""`amusd simulate`: which schedule would win, and by how much, on a machine that need not be at hand.

Plain decoding, synchronous blocks and windows of each length, chain and branching with each wait, and `auto`, on the
same answers, one at a time or several together. Everything here is arithmetic on a virtual clock: no model, no worker
process, no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from amusd.config import AsynchronousPolicy, DecodingConfig, RunConfig, SimulateConfig
from amusd.console import Console, table
from amusd.errors import ConfigError
from amusd.policies.factory import policy_name
from amusd.reporting.points import MeasuredPoint, measured_points
from amusd.simulation.calibration import Calibration, calibrate
from amusd.simulation.closed_forms import upper_bound
from amusd.simulation.cost import Costs, Duration, Shared
from amusd.simulation.simulator import Outcome, Simulator
from amusd.simulation.tokens import Answer, drawn_answers, replayed_answers
from amusd.types import Mode

CONFIGURED, TRIED, BEST = "configured", "tried", "best"
"""Why a row is there: its knobs were asked for, or are one of several values tried, of which one was the best."""

WAITING: tuple[AsynchronousPolicy, ...] = ("chain", "branching")
"""Policies that are tried with every wait for candidates."""

TREE_ROW_SHARE = 0.06
"""Of a draft step: what each node beyond the first adds where nothing is known. Measured on the embedded draft, whose
step of eight nodes takes 1.4 times that of one."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a prediction rests on."""

    simulator: Simulator
    acceptance: dict[str, Any]
    """How its answers were had, for the result."""
    points: tuple[MeasuredPoint, ...] = ()
    """Measured runs that the map shows."""

    def as_dict(self) -> dict[str, Any]:
        """For a result: all that the rows follow from, but the knobs."""
        simulator = self.simulator
        return {
            "acceptance": self.acceptance,
            "num_answers": len(simulator.answers),
            "num_tokens": sum(map(len, simulator.answers)),
            "batch_size": simulator.num_slots,
            "costs": simulator.costs.as_dict(),
            "max_candidates_in_a_pass": simulator.max_candidates,
            "tokens_per_step": simulator.tokens_per_step,
            "accept_next": simulator.accept_next,
            "can_branch": simulator.can_branch,
            "seed": simulator.seed,
        }


@dataclass(frozen=True, slots=True)
class Trial:
    """One schedule, and what it came to."""

    decoding: DecodingConfig
    outcome: Outcome
    choice: str
    num_groups: int = 1
    """Of the batch, which take turns."""

    def over(self, other: Trial) -> float:
        """How many times as fast as `other`."""
        return self.outcome.throughput.over(other.outcome.throughput)


@dataclass
class Bench:
    """Tries schedules on one simulated machine, each once."""

    simulator: Simulator
    decoding: DecodingConfig
    """The configured one; trials differ from it in what they are about."""
    report: Callable[[str], None] = lambda _name: None
    _outcomes: dict[tuple[DecodingConfig, int], Outcome] = field(default_factory=dict)

    def plain(self) -> Trial:
        """The target alone."""
        return self._trial(CONFIGURED, mode=Mode.AUTOREGRESSIVE)

    def synchronous(self, lengths: Iterable[int]) -> list[Trial]:
        """Blocks of each length; the fastest is marked."""
        return self._best_of("num_speculative_tokens", lengths, mode=Mode.SYNCHRONOUS)

    def in_turns(self, lengths: Iterable[int]) -> list[Trial]:
        """The same by halves of the batch: one drafts while the other is verified; none where there is but one answer.

        References:
            MineDraft, https://arxiv.org/abs/2603.18016.
        """
        if self.simulator.num_slots < 2:
            return []
        return self._best_of("num_speculative_tokens", lengths, num_groups=2, mode=Mode.SYNCHRONOUS)

    def windowed(self, lengths: Iterable[int]) -> list[Trial]:
        """Windows of each length; the fastest is marked."""
        return self._best_of("num_speculative_tokens", lengths, mode=Mode.ASYNCHRONOUS, policy="windowed")

    def asynchronous(self, policy: AsynchronousPolicy) -> Trial:
        """As configured."""
        return self._trial(CONFIGURED, mode=Mode.ASYNCHRONOUS, policy=policy)

    def tuned(self, policy: AsynchronousPolicy, waits: Iterable[int]) -> list[Trial]:
        """With each wait for candidates; the fastest is marked."""
        return self._best_of("min_candidates", waits, mode=Mode.ASYNCHRONOUS, policy=policy)

    def _best_of(self, knob: str, values: Iterable[int], **changes: Any) -> list[Trial]:
        return _mark_best([self._trial(TRIED, **changes, **{knob: value}) for value in sorted(set(values))])

    def _trial(self, choice: str, num_groups: int = 1, **changes: Any) -> Trial:
        decoding = replace(self.decoding, **changes)
        if (decoding, num_groups) not in self._outcomes:
            self.report(_name(decoding))
            simulator = replace(self.simulator, num_groups=num_groups)
            self._outcomes[decoding, num_groups] = simulator.run(decoding)
        return Trial(decoding, self._outcomes[decoding, num_groups], choice, num_groups)


def simulate(config: RunConfig, inputs: Inputs, console: Console, events_folder: Path) -> dict[str, Any]:
    """All rows, and the map where one is asked for; the documented JSON without `run_dir`.

    `events_folder` gets the events of the first answer, decoded alone under the configured policy.
    """
    settings, simulator = config.simulate, inputs.simulator
    waiting = _waiting(simulator)
    waits = {config.min_candidates, *settings.min_candidates}
    num_block_schedules = 2 + (simulator.num_slots > 1)
    num_trials = 2 + num_block_schedules * len(set(settings.synchronous_lengths)) + len(waiting) * len(waits)
    bench = Bench(simulator, config.decoding(), _progress(console, num_trials))
    plain = bench.plain()
    lengths = settings.synchronous_lengths
    trials = [plain, *bench.synchronous(lengths), *bench.in_turns(lengths), *bench.windowed(lengths)]
    for policy in waiting:
        trials += [bench.asynchronous(policy), *bench.tuned(policy, settings.min_candidates)]
    trials.append(bench.asynchronous("auto"))
    result: dict[str, Any] = {"rows": _rows(trials, plain, can_branch=simulator.can_branch), "inputs": inputs.as_dict()}
    if settings.grid:
        result |= {"grid": _grid(config, simulator, console), "points": [asdict(point) for point in inputs.points]}
    console.clear_progress()
    first = replace(simulator, answers=simulator.answers[:1], batch_size=1)
    first.run(bench.asynchronous(config.policy).decoding, events_folder=events_folder)
    return result


def simulate_text(result: dict[str, Any]) -> str:
    """What `simulate` found, for a person."""
    batch_size = result["inputs"]["batch_size"]
    texts = [_table(result["rows"], in_batches=batch_size > 1)]
    if batch_size > 1:
        texts.insert(0, f"{batch_size} answers at a time: tokens/s of all together, s/answer of each")
    if "grid" in result:
        texts.append(_grid_text(result["grid"]))
    return "\n\n".join(texts)


def _waiting(simulator: Simulator) -> tuple[AsynchronousPolicy, ...]:
    return WAITING if simulator.can_branch else ("chain",)


# What goes in


def inputs_of(config: RunConfig) -> Inputs:
    """Times and answers, measured or as given; what is given wins. Raises `ConfigError` for what is missing or wrong.

    Passes are as wide as `compare` would make them for the same block lengths.
    """
    settings = config.simulate
    longest_wait = max(settings.min_candidates)
    if longest_wait > config.max_lookahead:
        raise ConfigError(
            f"simulate.min_candidates={longest_wait}: must be at most max_lookahead ({config.max_lookahead})"
        )
    width = config.engine(longest_block=max(settings.synchronous_lengths)).max_verify_width
    calibration = None if config.calibration is None else calibrate(Path(config.calibration), config.drafter.kind)
    if calibration is None:
        for name in ("accept", "verify_ms", "draft_ms"):
            if getattr(config, name) is None:
                raise ConfigError(f"{name}: required to simulate without calibration=RUN_DIR")
    answers, acceptance = _answers(config, calibration)
    simulator = Simulator(
        costs=_costs(config, None if calibration is None else calibration.costs),
        answers=answers,
        max_candidates=width - 1,
        tokens_per_step=settings.tokens_per_step,
        accept_next=_accept_next(config, calibration),
        can_branch=config.drafter.can_branch,
        seed=settings.seed,
        batch_size=settings.batch_size,
    )
    points = measured_points(config, calibration) if settings.grid else ()
    return Inputs(simulator, acceptance, points)


def _answers(config: RunConfig, calibration: Calibration | None) -> tuple[tuple[Answer, ...], dict[str, Any]]:
    settings = config.simulate
    if calibration is not None and config.accept is None:
        answers = replayed_answers(calibration.traces, settings.seed)
        return answers, {
            "kind": "replay",
            "drafter": calibration.drafter,
            "accept": calibration.acceptance,
            "known_fraction": calibration.known_fraction,
        }
    assert config.accept is not None
    return _drawn(settings, config.accept), {"kind": "drawn", "accept": config.accept}


def _accept_next(config: RunConfig, calibration: Calibration | None) -> float:
    """Of the run whose answers are replayed, where it drafted trees; else as given."""
    if calibration is None or config.accept is not None or calibration.accept_next is None:
        return config.drafter.accept_next
    return calibration.accept_next


def _drawn(settings: SimulateConfig, accept: float) -> tuple[Answer, ...]:
    num_answers = max(settings.num_answers, settings.batch_size)
    return drawn_answers(accept, num_answers=num_answers, num_tokens=settings.num_tokens, seed=settings.seed)


def _costs(config: RunConfig, measured: Costs | None) -> Costs:
    settings = config.simulate
    costs = _with_spread(measured, settings.jitter) if measured else Costs(passes={}, draft_token=_same(0.0, 0.0))
    given: dict[str, Any] = {
        "row_ns": round(settings.row_ms * 1e6),
        "sequence_ns": round(settings.sequence_ms * 1e6),
        "draft_sequence_ns": round(settings.draft_sequence_ms * 1e6),
        "knee_rows": settings.knee_rows,
    }
    if config.verify_ms is not None:
        given["passes"] = {0: _same(config.verify_ms, settings.jitter)}
    if config.draft_ms is not None:
        given |= {"draft_token": _same(config.draft_ms, settings.jitter), "tree_steps": {}}
    if config.delay_ms is not None:
        given["to_target"] = given["to_draft"] = Duration.of_ms(config.delay_ms)
    if settings.overhead_ms is not None:
        given |= {"host": _same(settings.overhead_ms, 0.0), "host_before_verdict": 1.0}
    if settings.draft_row_ms is not None:
        given |= {"tree_row_ns": round(settings.draft_row_ms * 1e6), "tree_steps": {}}
    costs = replace(costs, **given)
    if settings.draft_row_ms is None and not costs.tree_steps:
        costs = replace(costs, tree_row_ns=round(TREE_ROW_SHARE * costs.draft_token.alone.mean_ms * 1e6))
    return costs


def _with_spread(costs: Costs, spread: float) -> Costs:
    def spread_out(shared: Shared) -> Shared:
        return Shared(replace(shared.alone, spread=spread), replace(shared.together, spread=spread))

    return replace(
        costs,
        passes={number: spread_out(shared) for number, shared in costs.passes.items()},
        draft_token=spread_out(costs.draft_token),
        tree_steps={number: spread_out(shared) for number, shared in costs.tree_steps.items()},
    )


def _same(milliseconds: float, spread: float) -> Shared:
    return Shared.same(Duration.of_ms(milliseconds, spread))


# What comes out


def _mark_best(trials: Sequence[Trial]) -> list[Trial]:
    fastest = max(trials, key=lambda trial: trial.outcome.throughput.tokens_per_second)
    return [replace(trial, choice=BEST) if trial is fastest else trial for trial in trials]


def _rows(trials: Sequence[Trial], plain: Trial, *, can_branch: bool) -> list[dict[str, Any]]:
    best_synchronous = next(
        trial
        for trial in trials
        if trial.decoding.mode is Mode.SYNCHRONOUS and trial.num_groups == 1 and trial.choice == BEST
    )
    return [_row(trial, plain, best_synchronous, can_branch=can_branch) for trial in trials]


def _row(trial: Trial, plain: Trial, best_synchronous: Trial, *, can_branch: bool) -> dict[str, Any]:
    decoding, metrics = trial.decoding, trial.outcome.metrics.as_dict()
    policy = policy_name(decoding)
    branches = policy in ("branching", "auto") and can_branch
    ratios = [
        reference.total_ns / answer.total_ns
        for reference, answer in zip(plain.outcome.answers, trial.outcome.answers, strict=True)
    ]
    return {
        "mode": decoding.mode.value,
        "policy": policy,
        "choice": trial.choice,
        "num_groups": trial.num_groups,
        "num_speculative_tokens": decoding.num_speculative_tokens
        if decoding.mode is Mode.SYNCHRONOUS or policy == "windowed"
        else None,
        "min_candidates": decoding.min_candidates if policy in WAITING else None,
        "fan_out": decoding.fan_out if branches else None,
        "rows_per_step": decoding.rows_per_step if branches else None,
        "speedup": trial.over(plain),
        # As `compare` has it: the median over the answers, not the ratio of all time.
        "speedup_vs_autoregressive": statistics.median(ratios),
        "speedup_vs_best_synchronous": None if decoding.mode is Mode.AUTOREGRESSIVE else trial.over(best_synchronous),
        "tokens_per_verification": metrics["mean_acceptance_length"],
        **metrics,
        "tokens_per_second": trial.outcome.throughput.tokens_per_second,
        "mean_latency_ms": statistics.fmean(answer.total_ns for answer in trial.outcome.answers) / 1e6,
    }


def _table(rows: Sequence[dict[str, Any]], *, in_batches: bool) -> str:
    header: tuple[str, ...] = (
        "mode",
        "tokens/s",
        "x plain",
        "x best sync",
        "accepted",
        "tokens/pass",
        "idle t/d",
        "wasted",
    )
    if in_batches:
        header = (*header, "s/answer")
    lines: list[tuple[str, ...]] = []
    for row in rows:
        plain = row["mode"] == Mode.AUTOREGRESSIVE.value
        lines.append(
            (
                _row_name(row),
                f"{row['tokens_per_second']:.1f}",
                f"{row['speedup']:.2f}",
                "" if plain else f"{row['speedup_vs_best_synchronous']:.2f}",
                "" if plain else _percent(row["acceptance_rate"]),
                f"{row['tokens_per_verification']:.2f}",
                _percent(row["target_idle_fraction"]) + ("" if plain else "/" + _percent(row["draft_idle_fraction"])),
                "" if plain else _percent(row["wasted_draft_fraction"]),
                *([f"{row['mean_latency_ms'] / 1000:.2f}"] if in_batches else []),
            )
        )
    return table(header, lines)


def _row_name(row: dict[str, Any]) -> str:
    if row["mode"] == Mode.AUTOREGRESSIVE.value:
        return str(row["mode"])
    name = str(row["policy"] or row["mode"])
    if row["num_groups"] > 1:
        name += " in turns"
    knob = row["min_candidates"] if row["num_speculative_tokens"] is None else row["num_speculative_tokens"]
    if knob is None:
        return name
    return f"{name} ({knob}{'' if row['choice'] == TRIED else ', ' + row['choice']})"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.0f} %"


def _name(decoding: DecodingConfig) -> str:
    if decoding.mode is Mode.SYNCHRONOUS:
        return f"synchronous, {decoding.num_speculative_tokens} tokens"
    policy = policy_name(decoding)
    if policy == "windowed":
        return f"windowed, {decoding.num_speculative_tokens} tokens"
    return f"{policy}, waits for {decoding.min_candidates}" if policy in WAITING else policy or decoding.mode.value


def _progress(console: Console, num_steps: int) -> Callable[[str], None]:
    done = 0

    def report(name: str) -> None:
        nonlocal done
        done += 1
        console.progress(name, min(done, num_steps), num_steps)

    return report


# The map


def _grid(config: RunConfig, simulator: Simulator, console: Console) -> list[dict[str, Any]]:
    """Each acceptance with each ratio of speeds: the tuned schedules, which of them wins, by how much, and `auto`."""
    settings = config.simulate
    cells = list(product(settings.grid_accepts, settings.grid_ratios))
    report = _progress(console, len(cells))
    found = []
    for accept, ratio in cells:
        report(f"acceptance {accept:g}, {ratio:g} draft steps a pass")
        found.append(_cell(config, simulator, accept, ratio))
    return found


def _cell(config: RunConfig, simulator: Simulator, accept: float, ratio: float) -> dict[str, Any]:
    settings, costs = config.simulate, simulator.costs
    draft_ms = costs.passes[min(costs.passes)].alone.mean_ms / ratio
    costs = replace(
        costs,
        draft_token=_same(draft_ms, settings.jitter),
        tree_steps={},
        tree_row_ns=round(costs.tree_row_share * draft_ms * 1e6),
    )
    bench = Bench(replace(simulator, costs=costs, answers=_drawn(settings, accept)), config.decoding())
    plain = bench.plain()
    synchronous = _best(bench.synchronous(settings.synchronous_lengths))
    tuned = {"windowed": _best(bench.windowed(settings.synchronous_lengths))}
    tuned |= {policy: _best(bench.tuned(policy, settings.min_candidates)) for policy in _waiting(simulator)}
    auto = bench.asynchronous("auto")
    speedups: dict[str, float] = {"autoregressive": 1.0, "synchronous": synchronous.over(plain)}
    speedups |= {policy: trial.over(plain) for policy, trial in tuned.items()}
    ranked = sorted(speedups, key=lambda name: speedups[name], reverse=True)
    return {
        "accept": accept,
        "ratio": ratio,
        "speedups": speedups,
        "num_speculative_tokens": synchronous.decoding.num_speculative_tokens,
        "window": tuned["windowed"].decoding.num_speculative_tokens,
        "min_candidates": {policy: tuned[policy].decoding.min_candidates for policy in _waiting(simulator)},
        "winner": ranked[0],
        "margin": speedups[ranked[0]] / speedups[ranked[1]] - 1,
        "auto": auto.over(plain),
        "upper_bound": upper_bound(accept, ratio),
    }


def _best(trials: Iterable[Trial]) -> Trial:
    return next(trial for trial in trials if trial.choice == BEST)


def _grid_text(cells: Sequence[dict[str, Any]]) -> str:
    """One line for each acceptance: who wins, its speed-up, and by how much it beats the next."""
    by_place = {(cell["accept"], cell["ratio"]): cell for cell in cells}
    ratios = list(dict.fromkeys(cell["ratio"] for cell in cells))
    header = ("accept \\ verify/draft", *(f"{ratio:g}" for ratio in ratios))
    lines = []
    for accept in dict.fromkeys(cell["accept"] for cell in cells):
        row = [by_place[accept, ratio] for ratio in ratios]
        shown = [f"{cell['winner']} {max(cell['speedups'].values()):.2f} (+{_percent(cell['margin'])})" for cell in row]
        lines.append((f"{accept:g}", *shown))
    return table(header, lines)
