"""The report: what was expected beside what was measured, then all measurements; made from whatever parts have left."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.gpu_proof.expectations import ABOUT, AT_LEAST, AT_MOST, EXPECTATIONS, Expectation, as_text, table
from experiments.gpu_proof.plan import GPU, PARTS
from experiments.gpu_proof.predictions import Device, device_of
from experiments.gpu_proof.records import Ending, Record, find, read_ending, read_records

NEAR = 1.25
"""A figure that was expected to be `about` so much may differ by this factor."""
NOT_SHOWN = ("kind", "sequence_ids", "lines", "packages", "cpu", "gpus")


def write_report(results: Path, folder: Path, name: str, device: str) -> tuple[Path, Path]:
    """Write `NAME.md` and `NAME.json`; returns both."""
    endings = [ending for part in PARTS if (ending := read_ending(results, part.name)) is not None]
    measured = {ending.part: read_records(results / f"{ending.part}.jsonl") for ending in endings}
    records = [record for own in measured.values() for record in own]
    known = _device_of(records) if device == GPU else None
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "experiment": "gpu_proof",
        "date": dt.datetime.now().astimezone().date().isoformat(),
        "device": name,
        "parts": [asdict(ending) for ending in endings],
        "expectations": [] if known is None else [_outcome(one, known, records) for one in EXPECTATIONS],
        "measured": measured,
    }
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(_markdown(document, endings, known, records), encoding="utf-8")
    return folder / f"{name}.md", folder / f"{name}.json"


def verdict(one: Expectation, device: Device, value: float) -> str:
    """Whether what was measured is what was expected: `as expected`, or by which factor it differs."""
    expected = one.value(device)
    if one.bound == AT_MOST:
        holds = value <= expected
    elif one.bound == AT_LEAST:
        holds = value >= expected
    elif one.bound == ABOUT:
        holds = expected / NEAR <= value <= expected * NEAR
    else:
        holds = value == expected
    if holds:
        return "as expected"
    return f"{value / expected:.2f} times the expected figure" if expected else "not as expected"


def _device_of(records: Sequence[Record]) -> Device | None:
    found, bandwidth = find(records, "device"), find(records, "bandwidth")
    if found is None:
        return None
    return device_of(found["name"], 0.0 if bandwidth is None else bandwidth["gb_s"])


def _outcome(one: Expectation, device: Device, records: Sequence[Record]) -> dict[str, Any]:
    value = one.measured(records)
    return {
        "part": one.part,
        "what": one.what,
        "unit": one.unit,
        "bound": one.bound,
        "expected": one.value(device),
        "measured": value,
        "verdict": "not measured" if value is None else verdict(one, device, value),
    }


def _markdown(
    document: dict[str, Any], endings: Sequence[Ending], device: Device | None, records: Sequence[Record]
) -> str:
    parts = [f"# GPU proof: {document['device']}", _introduction(document, device, records), _parts(endings)]
    if device is not None:
        parts += ["## Expected and measured", table(device, lambda one: _measured(one, device, records))]
    parts.append("## All measurements")
    for ending in endings:
        own = document["measured"][ending.part]
        kinds = dict.fromkeys(record["kind"] for record in own)
        for kind in kinds:
            rows = [record for record in own if record["kind"] == kind]
            parts += [f"### {ending.part}: {kind}", _table(rows)]
    return "\n\n".join(parts) + "\n"


def _introduction(document: dict[str, Any], device: Device | None, records: Sequence[Record]) -> str:
    machine = find(records, "machine") or {}
    facts = [f"Date {document['date']}", f"commit {machine.get('commit')}", f"Python {machine.get('python')}"]
    if found := find(records, "torch"):
        facts.append(f"torch {found['version']}")
    if found := find(records, "device"):
        facts.append(f"{found['num_devices']} x {found['name']}")
    elif cpu := machine.get("cpu"):
        facts.append(f"{cpu['allowed_cores']} cores of {cpu['model']}")
    text = "; ".join(facts) + ". `make gpu-proof` made this file."
    if device is None:
        text += (
            "\n\n**No GPU: this is a test of the proof itself, with small shapes on a CPU.** Its figures say nothing"
            " about a GPU. The expected figures are in `experiments/gpu_proof/README.md`, and await one."
        )
    return text + (
        "\n\nAll weights are random, of the shapes of public models. What is called a projection is simulated, not"
        " measured."
    )


def _parts(endings: Sequence[Ending]) -> str:
    does = {part.name: part.does for part in PARTS}
    lines = ["| part | what it measures | ended | seconds |", "| --- | --- | --- | --- |"]
    lines += [f"| {one.part} | {does[one.part]} | {one.status} | {one.seconds:.0f} |" for one in endings]
    tried = {one.part for one in endings}
    lines += [f"| {part.name} | {part.does} | not tried | |" for part in PARTS if part.name not in tried]
    for one in endings:
        if one.reason:
            lines += ["", f"`{one.part}` {one.status}:", "", "```", one.reason, "```"]
    return "\n".join(lines)


def _measured(one: Expectation, device: Device, records: Sequence[Record]) -> str:
    value = one.measured(records)
    if value is None:
        return "not measured"
    return f"{as_text(value, one.unit)}: {verdict(one, device, value)}"


def _table(records: Sequence[Record]) -> str:
    columns = [name for name in dict.fromkeys(name for record in records for name in record) if name not in NOT_SHOWN]
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    lines += [f"| {' | '.join(_cell(record.get(name)) for name in columns)} |" for record in records]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_cell(one)}" for key, one in value.items())
    return str(value).replace("|", "/").replace("\n", " ")
