"""The page of a sweep: every row of every job, and speed over the keys that were swept."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from amusd.config import RunConfig
from amusd.reporting.columns import cells_of, columns_of, row_kind
from amusd.reporting.comparison import MODES
from amusd.reporting.facts import NOT_SHOWN, facts_of, machine_name, models_name, prompts_name
from amusd.reporting.figures import NUM_SERIES, lines
from amusd.reporting.page import Cell, Html, definitions, facts, figures, page, section, sortable, tag

MAX_FIGURES = 12
MEASURES = (
    (
        "tokens_per_second",
        "Tokens per second",
        "Jobs run one after another: where plain decoding should not change, it shows how steady the machine was.",
    ),
    (
        "speedup_vs_autoregressive",
        "Speed-up over plain decoding",
        "Against plain decoding in the same job, prompt by prompt.",
    ),
)
"""The measures that are drawn: a key of the rows, its title, how to read it."""

JobSummary = Mapping[str, Any]
"""One job as `sweep.json` has it: `job`, `swept` (key -> value), `exit_code`, `rows`."""


def sweep_page(
    *,
    command: str,
    arguments: Sequence[str],
    swept_keys: Sequence[str],
    jobs: Sequence[JobSummary],
    config: RunConfig,
    environment: Mapping[str, Any],
) -> str:
    """The summary of a sweep as HTML. `config` is the first job's: what is not swept holds for all."""
    rows = [(job, row) for job in jobs for row in job["rows"]]
    columns = columns_of([row for _, row in rows])
    cells = [[*_head(job), *cells_of(row, columns)] for job, row in rows]
    header = ["job", *swept_keys, "mode", *(column.heading for column in columns)]
    title = f"{MODES} over {', '.join(swept_keys)}" if swept_keys else MODES
    known = [
        fact for fact in facts_of(config, environment) if environment or fact[0] not in ("Machine", "Software", "Date")
    ]
    measured = f"{models_name(config)}, on {machine_name(environment)}; {prompts_name(config)}. {_progress(jobs)}"
    typed = (argument for argument in arguments if argument.partition("=")[0] not in NOT_SHOWN)
    return page(
        title,
        tag("p", measured[0].upper() + measured[1:], class_="quiet"),
        section("Figures", figures(itertools.islice(_figures(swept_keys, jobs), MAX_FIGURES)))
        if rows and swept_keys
        else Html(),
        section("Result", sortable("Result", header, 2 + len(swept_keys), cells), _failed(jobs)),
        section(
            "What was measured",
            tag("p", "As the first job has it; the others differ in the swept keys.", class_="quiet"),
            facts(known),
            tag("p", "The same again:"),
            tag("pre", shlex.join(["amusd", command, "-m", *typed])),
        ),
        section("What the columns mean", definitions(columns)),
    )


def _head(job: JobSummary) -> list[Cell]:
    number = str(job["job"])
    return [(number, number), *((value, value) for value in job["swept"].values())]


def _progress(jobs: Sequence[JobSummary]) -> str:
    num_done = sum(job["exit_code"] == 0 for job in jobs)
    return f"{len(jobs)} jobs." if num_done == len(jobs) else f"{num_done} of {len(jobs)} jobs are done."


def _failed(jobs: Sequence[JobSummary]) -> Html:
    ended = [job for job in jobs if job["exit_code"] not in (0, None)]
    names = ", ".join(f"{job['job']} (exit code {job['exit_code']})" for job in ended)
    return tag("p", f"Not completed: job {names}.") if ended else Html()


def _figures(keys: Sequence[str], jobs: Sequence[JobSummary]) -> Iterator[tuple[str, Html, str]]:
    """Each measure over the key with the most values, once for each choice of the others."""
    values = {key: list(dict.fromkeys(job["swept"][key] for job in jobs)) for key in keys}
    across = max(keys, key=lambda key: len(values[key]))
    others = [key for key in keys if key != across]
    for choice in itertools.product(*(values[key] for key in others)):
        chosen = [job for job in jobs if [job["swept"][key] for key in others] == list(choice)]
        where = "".join(f", {key}={value}" for key, value in zip(others, choice, strict=True))
        for measure, name, remark in MEASURES:
            title = f"{name} over {across}{where}"
            series = _series(measure, across, values[across], chosen)
            if series:
                drawing = lines(
                    title,
                    [_short(value) for value in values[across]],
                    series[:NUM_SERIES],
                    lambda value: f"{value:.3g}",
                    top=max(row.get(measure) or 0.0 for job in jobs for row in job["rows"]) or 1.0,
                    axis=across,
                )
                yield title, drawing, remark


def _series(
    measure: str, key: str, values: Sequence[str], jobs: Sequence[JobSummary]
) -> list[tuple[str, list[float | None], int]]:
    """The measure at each value of the key, for each way to decode; None where it was not measured."""
    found: dict[str, dict[str, float]] = {}
    for job in jobs:
        for row in job["rows"]:
            if row.get(measure) is not None:
                found.setdefault(row_kind(row), {})[job["swept"][key]] = row[measure]
    return [(name, [at.get(value) for value in values], look) for look, (name, at) in enumerate(found.items())]


def _short(value: str) -> str:
    return value if len(value) <= 14 else f"{value[:12]}…"
