"""How well `amusd simulate` predicts the gain of another schedule, link or draft.

Runs on the first half of the prompts, by chain and branching, calibrate the simulator for each draft. It predicts all
schedules at other delays, which are measured on the second half.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from amusd.config import RunConfig
from amusd.config.decoding import AsynchronousPolicy
from amusd.config.engine import DrafterKind
from amusd.console import table
from amusd.errors import ConfigError
from amusd.policies.factory import policy_name
from experiments.common import Document, compare, per_prompt_of, read_json, run_amusd, speedups, write_results
from experiments.plotting import LOOKS, OUTLINE, caption, run, subplots
from experiments.request import Request, parser_of

POLICIES: dict[DrafterKind, tuple[AsynchronousPolicy, ...]] = {
    "embedded": ("chain", "windowed", "branching", "auto"),
    "ngram": ("chain", "windowed", "auto"),
}
"""Policies of each drafter."""
CALIBRATING: dict[DrafterKind, tuple[AsynchronousPolicy, ...]] = {
    "embedded": ("chain", "branching"),
    "ngram": ("chain",),
}
DELAYS_MS = (0, 10)
LENGTHS = (1, 2, 4)
WINDOW = 4
WAITS = (0, 1, 4)
CALIBRATING_WAIT = 1
CALIBRATING_LENGTH = 2

Setting = tuple[str, float, str, int]
"""Drafter, delay in ms, policy or mode, and its tuned value (0: none)."""


def main() -> None:
    """Run the script."""
    run(parser_of("simulator_fidelity", __doc__, num_prompts=16, num_tokens=96), measure, draw)


def measure(request: Request, _arguments: object) -> None:
    """Measure, then predict and compare."""
    lines = request.lines()
    if len(lines) < 2:
        raise ConfigError(f"--num-prompts={request.num_prompts}: at least 2, a half to calibrate and a half to measure")
    calibrations = {
        "other prompts": measure_calibration(request, lines[::2], "other"),
        "same prompts": measure_calibration(request, lines[1::2], "same"),
    }
    measured = measure_settings(request, lines[1::2])
    rows = [
        row | {"calibration": name}
        for name, run_dirs in calibrations.items()
        for row in predict(run_dirs, measured, request.runs / "simulate" / name.partition(" ")[0])
    ]
    summary = summary_of(rows)
    print(rows_text(rows), summary_text(summary), sep="\n\n")
    machine = read_json(measured[0] / "environment.json")
    write_results(request, machine, {"rows": rows, "summary": summary})


# Measuring


def measure_calibration(request: Request, lines: Sequence[str], name: str) -> list[Path]:
    """Run each draft once."""
    found = []
    for drafter, policies in CALIBRATING.items():
        overrides = [
            f"drafter={drafter}",
            f"compare.policies=[{','.join(policies)}]",
            f"min_candidates={CALIBRATING_WAIT}",
            f"compare.synchronous_lengths=[{CALIBRATING_LENGTH}]",
            *request.workload(lines, name),
        ]
        found += _runs(overrides, request.runs / name / drafter)
    return found


def measure_settings(request: Request, lines: Sequence[str]) -> list[Path]:
    """Run every draft, delay, length, policy and wait; the chain's other waits have runs of their own."""
    delays = DELAYS_MS[1:2] if request.quick else DELAYS_MS
    lengths = LENGTHS[1:2] if request.quick else LENGTHS
    waits = WAITS[:1] if request.quick else WAITS
    found = []
    for drafter, policies in POLICIES.items():
        overrides = [
            f"drafter={drafter}",
            f"transport.delay_ms={','.join(map(str, delays))}",
            f"num_speculative_tokens={WINDOW}",
            *request.workload(lines, "measured"),
        ]
        all_policies = [f"compare.policies=[{','.join(policies)}]", f"min_candidates={waits[0]}"]
        shown = f"compare.synchronous_lengths=[{','.join(map(str, lengths))}]"
        found += _runs([*overrides, *all_policies, shown], request.runs / "all" / drafter)
        if waits[1:]:
            others = ["policy=chain", f"min_candidates={','.join(map(str, waits[1:]))}"]
            length = f"compare.synchronous_lengths=[{CALIBRATING_LENGTH}]"
            found += _runs([*overrides, *others, length], request.runs / "waits" / drafter)
    return found


def _runs(overrides: Sequence[str], folder: Path) -> list[Path]:
    return [folder / str(number) for number in range(len(compare(overrides, folder)))]


# Predicting


def predict(calibrations: Sequence[Path], measured: Sequence[Path], folder: Path) -> list[Document]:
    """A row for each setting that was measured: the measured speed-up, the predicted one, the relative error."""
    by_drafter = {_config(run_dir).drafter.kind: run_dir for run_dir in calibrations}
    found: dict[Setting, list[float]] = {}
    predicted: dict[Setting, float] = {}
    for number, run_dir in enumerate(measured):
        drafter = _config(run_dir).drafter.kind
        for setting, speedup in measured_speedups(run_dir):
            found.setdefault(setting, []).append(speedup)
        predicted |= predicted_speedups(by_drafter[drafter], run_dir, folder / str(number))
    known = {setting for run_dir in calibrations for setting, _ in measured_speedups(run_dir)}
    return [
        {
            "drafter": setting[0],
            "delay_ms": setting[1],
            "policy": setting[2],
            "knob": setting[3],
            "calibrated": setting in known,
            "measured": statistics.median(values),
            "num_measured": len(values),
            "predicted": predicted[setting],
            "error": predicted[setting] / statistics.median(values) - 1,
        }
        for setting, values in sorted(found.items())
    ]


def measured_speedups(run_dir: Path) -> Iterator[tuple[Setting, float]]:
    """Speed-ups of a run of `amusd compare` for each length and policy: medians over its prompts."""
    from amusd.commands.contestants import contestants_of

    config, per_prompt = _config(run_dir), per_prompt_of(run_dir)
    for contestant in contestants_of(config):
        decoding = contestant.decoding
        if decoding.mode == "autoregressive":
            continue
        assert contestant.drafter is not None
        name = policy_name(decoding) or decoding.mode
        in_blocks = name in ("synchronous", "windowed")
        knob = decoding.num_speculative_tokens if in_blocks else 0 if name == "auto" else decoding.min_candidates
        setting = (contestant.drafter, config.transport.delay_ms, name, knob)
        yield setting, statistics.median(speedups(per_prompt, contestant.name))


def predicted_speedups(calibration: Path, run_dir: Path, folder: Path) -> dict[Setting, float]:
    """`amusd simulate` with the settings of the run in `run_dir`."""
    config, calibrated = _config(run_dir), _config(calibration)
    kind, delay_ms = config.drafter.kind, config.transport.delay_ms
    lengths = sorted({*config.synchronous_lengths(), config.num_speculative_tokens})
    overrides = [
        f"calibration={calibration.absolute()}",
        f"drafter={kind}",
        f"min_candidates={config.min_candidates}",
        f"num_speculative_tokens={config.num_speculative_tokens}",
        f"max_lookahead={config.max_lookahead}",
        f"max_wait_passes={config.max_wait_passes}",
        f"simulate.synchronous_lengths=[{','.join(map(str, lengths))}]",
        f"simulate.min_candidates=[{config.min_candidates}]",
    ]
    if delay_ms != calibrated.transport.delay_ms:
        overrides.append(f"delay_ms={delay_ms}")
    found = {}
    for row in run_amusd("simulate", overrides, folder)["rows"]:
        if row["mode"] != "autoregressive":
            knob = row["num_speculative_tokens"] or row["min_candidates"] or 0
            found[kind, delay_ms, row["policy"] or row["mode"], knob] = row["speedup_vs_autoregressive"]
    return found


def _config(run_dir: Path) -> RunConfig:
    from launch.run_directory import read_config

    return read_config(run_dir)


# Comparing


def summary_of(rows: Sequence[Document]) -> dict[str, Document]:
    """Relative errors over settings that the calibration did not run, by calibration and draft."""
    groups: dict[str, list[Document]] = {}
    for row in rows:
        if not row["calibrated"]:
            groups.setdefault(f"{row['calibration']}, {row['drafter']}", []).append(row)
            groups.setdefault(row["calibration"], []).append(row)
    summary: dict[str, Document] = {}
    for name, own in groups.items():
        errors = [abs(row["error"]) for row in own]
        if errors:
            summary[name] = {"num_settings": len(errors), "median": statistics.median(errors), "worst": max(errors)}
    return summary


def rows_text(rows: Sequence[Document]) -> str:
    """A table with a line for each setting."""
    lines = [
        (
            _name(row),
            f"{row['delay_ms']:g}",
            f"{row['measured']:.2f}",
            f"{row['predicted']:.2f}",
            f"{100 * row['error']:+.1f} %",
            row["calibration"] + (", this setting" if row["calibrated"] else ""),
        )
        for row in rows
    ]
    return table(("setting", "delay, ms", "measured", "predicted", "error", "calibrated on"), lines)


def _name(row: Document) -> str:
    knob = "" if row["policy"] == "auto" else f" ({row['knob']})"
    return f"{row['policy']}{knob}, {row['drafter']}"


def summary_text(summary: dict[str, Document]) -> str:
    """Median and worst error over settings that the calibration did not run."""
    lines = [
        (name, str(own["num_settings"]), f"{100 * own['median']:.1f} %", f"{100 * own['worst']:.1f} %")
        for name, own in summary.items()
    ]
    return table(("settings", "number", "median error", "worst error"), lines)


def draw(results: Document) -> Any:
    """Draw a point for each setting: colour and marker by policy, filled for the first draft, open for others."""
    rows = [row for row in results["rows"] if row["calibration"] == "same prompts"]
    figure, axes = subplots(width=5.6, height=5.2)
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    for name in dict.fromkeys(row["policy"] for row in rows):
        colour, marker = LOOKS[name]
        for drafter in drafters:
            own = [row for row in rows if (row["policy"], row["drafter"]) == (name, drafter)]
            if own:
                axes.plot(
                    [row["measured"] for row in own],
                    [row["predicted"] for row in own],
                    marker,
                    color=colour,
                    markerfacecolor=colour if drafter == drafters[0] else "none",
                    label=f"{name}, {drafter}",
                )
    values = [row[name] for row in rows for name in ("measured", "predicted")]
    ends = [0.95 * min(values), 1.05 * max(values)]
    axes.plot(ends, ends, color=OUTLINE, linewidth=1, label="as measured")
    axes.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color=OUTLINE, alpha=0.08)
    axes.set(aspect="equal", xlim=ends, ylim=ends)
    axes.set_xlabel("measured speed-up over plain decoding (times)")
    axes.set_ylabel("predicted speed-up (times); grey: within 10 %")
    axes.legend(loc="upper left", fontsize=8)
    figure.supxlabel(caption(results), fontsize=7)
    return figure


if __name__ == "__main__":
    main()
