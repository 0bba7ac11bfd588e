"""The page of one comparison."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from amusd.config import RunConfig
from amusd.files import REPORT_FILE, write_whole
from amusd.reporting.columns import Row, cells_of, columns_of, percent, row_name
from amusd.reporting.facts import command_of, facts_of, machine_name, models_name, prompts_name
from amusd.reporting.figures import bars, lines, stacked
from amusd.reporting.page import Cell, Html, definitions, facts, figures, join, page, section, sortable, tag
from amusd.tracing.accounting import DRAFT_PARTS, TARGET_PARTS

MODES = "Plain, synchronous and asynchronous decoding"
PARTS = {"target": TARGET_PARTS, "draft": DRAFT_PARTS}


def write_comparison_page(run_directory: Path, config: RunConfig, result: Mapping[str, Any]) -> None:
    """Write `report.html`, with the timeline where a picture of it (`timeline.svg`) lies in the directory."""
    picture = run_directory / "timeline.svg"
    timeline = picture.read_text(encoding="utf-8") if picture.is_file() else None
    write_whole(run_directory / REPORT_FILE, comparison_page(result, config, timeline=timeline))


def comparison_page(result: Mapping[str, Any], config: RunConfig, *, timeline: str | None = None) -> str:
    """The result of `amusd compare` as HTML. `timeline` is an SVG document; no prompt and no answer is shown."""
    rows: Sequence[Row] = result["rows"]
    environment: Mapping[str, Any] = result.get("environment") or {}
    columns = columns_of(rows)
    known = facts_of(config, environment)
    num_refused = result.get("num_refused_prompts")
    if num_refused:
        known.append(("Left out", f"{num_refused} prompt{'s' if num_refused > 1 else ''} that did not fit"))
    cells = [cells_of(row, columns) for row in rows]
    lead = f"{models_name(config)}, on {machine_name(environment)}; {prompts_name(config)}."
    return page(
        f"{MODES} compared",
        tag("p", lead[0].upper() + lead[1:], class_="quiet"),
        section("Result", sortable("Result", ["mode", *(c.heading for c in columns)], 1, cells), _tuned(rows)),
        section("Figures", figures(_figures(rows))),
        _timeline(timeline),
        _time_table(rows),
        section(
            "What was measured", facts(known), tag("p", "The same again:"), tag("pre", command_of("compare", config))
        ),
        section("What the columns mean", definitions(columns)),
        section("What the shares of time mean", facts(_part_meanings()))
        if any(_times(row) for row in rows)
        else Html(),
    )


def _figures(rows: Sequence[Row]) -> Iterator[tuple[str, Html, str]]:
    """Title, drawing and caption of each."""
    speedups = [(row_name(row), float(row["speedup_vs_autoregressive"])) for row in rows]
    yield (
        "Speed-up over plain decoding",
        bars("Speed-up by mode", speedups, lambda value: f"{value:.2f}", reference="plain = 1"),
        "Median over prompts of the ratio of times per token, on the same prompts.",
    )
    accepting = [
        (row_name(row), row["acceptance_by_position"], look)
        for look, row in enumerate(rows)
        if row.get("acceptance_by_position")
    ]
    if accepting:
        longest = max(len(shares) for _, shares, _ in accepting)
        series = [(name, [*shares, *[None] * (longest - len(shares))], look) for name, shares, look in accepting]
        positions = [str(position) for position in range(1, longest + 1)]
        yield (
            "Acceptance by position",
            lines("Acceptance by position", positions, series, percent, top=1.0, axis="position in the block"),
            "Share of the verifications with candidates in which the candidate at this position was accepted.",
        )
    for worker in PARTS:
        stacks = [
            (row_name(row), {_spaced(part): share for part, share in shares.items()})
            for row in rows
            for name, shares in _times(row)
            if name == worker
        ]
        if stacks:
            drawing = stacked(f"Shares of the {worker}'s time", stacks)
            yield f"Where the {worker}'s time went", drawing, "From the events that both workers recorded."


def _times(row: Row) -> list[tuple[str, Mapping[str, float]]]:
    """Worker -> part -> share of its time; nothing where it was not recorded."""
    return [(worker, shares) for worker, shares in (row.get("time") or {}).items() if shares]


def _part_meanings() -> list[tuple[str, str]]:
    return [(f"{worker}: {_spaced(part)}", text) for worker, parts in PARTS.items() for part, text in parts.items()]


def _spaced(part: str) -> str:
    return part.replace("_", " ")


def _time_table(rows: Sequence[Row]) -> Html:
    times = [(row_name(row), worker, shares) for row in rows for worker, shares in _times(row)]
    if not times:
        return Html()
    parts = list(dict.fromkeys(part for _, _, shares in times for part in shares))
    lines_: list[list[Cell]] = [
        [
            (name, name),
            (worker, worker),
            *((percent(shares[part]), repr(shares[part])) if part in shares else ("", "") for part in parts),
        ]
        for name, worker, shares in times
    ]
    return section(
        "Shares of time", sortable("Shares of time", ["mode", "worker", *(_spaced(part) for part in parts)], 2, lines_)
    )


def _tuned(rows: Sequence[Row]) -> Html:
    """The lengths that a synchronous row was chosen from."""
    notes = []
    for row in rows:
        if len(row.get("tuned") or {}) > 1:
            tried = ", ".join(f"{length}: {speed:.1f}" for length, speed in row["tuned"].items())
            notes.append(tag("p", f"{row_name(row)} was the fastest of (tokens/s) {tried}.", class_="quiet"))
    return join(notes)


def _timeline(svg: str | None) -> Html:
    """A picture of its own, in which a browser runs and loads nothing."""
    if svg is None:
        return Html()
    data = base64.b64encode(svg.encode()).decode()
    image = tag("img", src=f"data:image/svg+xml;base64,{data}", alt="What each worker did, over time")
    return section("Timeline", tag("div", image, class_="scroll", role="region", aria_label="Timeline", tabindex=0))
