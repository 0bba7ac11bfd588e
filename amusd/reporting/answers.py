"""The answers of a comparison one by one: what was said (`answers.jsonl`) and what it took (`prompts.csv`)."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

ANSWERS_FILE = "answers.jsonl"
PROMPTS_FILE = "prompts.csv"
KEYS = ("prompt", "mode", "policy", "drafter", "length", "repeat")
"""Columns that name an answer: line of the workload, how it was decoded, which time it was asked for; and `batch_size`
where several were made at a time."""
MEASURES = ("tokens", "ms", "accepted", "identical")
"""Columns of `prompts.csv`: tokens of the answer, its time, candidates accepted, whether it is plain decoding's."""

CONTENT = ("text", "token_ids", "finish_reason")
"""Columns that `prompts.csv` leaves out."""

Record = Mapping[str, Any]
"""One answer: `KEYS`, `CONTENT` and `MEASURES`."""


def answers_jsonl(records: Sequence[Record]) -> str:
    """An object a line: all but the measures."""
    return json_lines([{name: value for name, value in record.items() if name not in MEASURES} for record in records])


def json_lines(records: Sequence[Record]) -> str:
    """An object a line."""
    return "".join(json.dumps(record) + "\n" for record in records)


def prompts_csv(records: Sequence[Record]) -> str:
    """A line for each answer, without its text."""
    return csv_text([{name: value for name, value in record.items() if name not in CONTENT} for record in records])


def csv_text(records: Sequence[Record]) -> str:
    """A table with a column for every name in any of the records."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for record in records for name in record)))
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
