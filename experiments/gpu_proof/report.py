"""The report: the endings of all parts, then all measurements that there are."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.gpu_proof.plan import GPU, PARTS
from experiments.gpu_proof.records import Ending, Record, find, read_ending, read_records

NOT_SHOWN = ("kind", "sequence_ids", "lines", "packages", "cpu", "gpus")


def write_report(results: Path, folder: Path, name: str, device: str) -> tuple[Path, Path]:
    """Write `NAME.md` and `NAME.json`; return both paths."""
    endings = [ending for part in PARTS if (ending := read_ending(results, part.name)) is not None]
    measured = {ending.part: read_records(results / f"{ending.part}.jsonl") for ending in endings}
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "experiment": "gpu_proof",
        "date": dt.datetime.now().astimezone().date().isoformat(),
        "device": name,
        "parts": [asdict(ending) for ending in endings],
        "measured": measured,
    }
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(_markdown(document, endings, is_gpu=device == GPU), encoding="utf-8")
    return folder / f"{name}.md", folder / f"{name}.json"


def _markdown(document: dict[str, Any], endings: Sequence[Ending], *, is_gpu: bool) -> str:
    introduction = _introduction(document, is_gpu=is_gpu)
    parts = [f"# GPU proof: {document['device']}", introduction, _parts(endings), "## All measurements"]
    for ending in endings:
        own = document["measured"][ending.part]
        kinds = dict.fromkeys(record["kind"] for record in own)
        for kind in kinds:
            rows = [record for record in own if record["kind"] == kind]
            parts += [f"### {ending.part}: {kind}", _table(rows)]
    return "\n\n".join(parts) + "\n"


def _introduction(document: dict[str, Any], *, is_gpu: bool) -> str:
    records = [record for own in document["measured"].values() for record in own]
    machine, torch, device = (find(records, kind) or {} for kind in ("machine", "torch", "device"))
    facts = [f"Date {document['date']}", f"commit {machine.get('commit')}", f"Python {machine.get('python')}"]
    facts.append(f"torch {torch.get('version')}")
    if is_gpu:
        facts.append(f"{device.get('num_devices')} x {device.get('name')}")
    elif cpu := machine.get("cpu"):
        facts.append(f"{cpu['allowed_cores']} cores of {cpu['model']}")
    text = (
        "; ".join(facts)
        + ". `make gpu-proof` made this file; `experiments/gpu_proof/README.md` says what was expected."
    )
    if not is_gpu:
        text += (
            "\n\n**No GPU: this is a test of the proof itself, with small shapes on a CPU.** Its figures say nothing"
            " about a GPU."
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
