"""A calibration as one JSON file: what a run has shown, without its events, or times that were put together by hand.

format        FORMAT
about         where the figures come from, as text
drafter       name of the drafter
accept_next   see `Calibration`
costs         the fields of `Costs`; times as {"samples_ns": [...]}, some with `spread`, work that the other worker may
              disturb as {"alone": times, "together": times}
traces        one text for each answer: 1 right, 0 wrong, ? never compared
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from amusd.errors import ConfigError
from amusd.simulation.calibration import Calibration, calibrate
from amusd.simulation.cost import Costs, Duration, Shared
from amusd.simulation.tokens import trace_rate

FORMAT = "amusd calibration 1"

_OUTCOMES: Mapping[str, bool | None] = {"1": True, "0": False, "?": None}
_LETTERS = {outcome: letter for letter, outcome in _OUTCOMES.items()}


def load_calibration(path: Path, drafter: str, key: str = "calibration") -> Calibration:
    """Return the calibration in a file that `write_calibration` wrote, or that of a run directory (`calibrate`).

    `drafter`: which one counts if a run had several. `key`: the setting that named the path, for errors. Raises
    `ConfigError`.
    """
    if not path.is_file():
        return calibrate(path, drafter, key)
    try:
        return _calibration(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{key}={path}: not a calibration file ({type(error).__name__}: {error}); name one, or a run directory"
        ) from None


def write_calibration(path: Path, calibration: Calibration, about: str) -> None:
    """Write `calibration` to one file. `about`: where its figures come from."""
    document = {
        "format": FORMAT,
        "about": about,
        "drafter": calibration.drafter,
        "accept_next": calibration.accept_next,
        "costs": _costs_as_dict(calibration.costs),
        "traces": ["".join(_LETTERS[outcome] for outcome in trace) for trace in calibration.traces],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _calibration(document: Any) -> Calibration:
    if document["format"] != FORMAT:
        raise ValueError(f"format {document['format']!r} is not {FORMAT!r}")
    traces = tuple(tuple(_OUTCOMES[letter] for letter in text) for text in document["traces"])
    if not any(trace_rate(trace) is not None for trace in traces):
        raise ValueError("no trace says whether a token was right")
    return Calibration(
        costs=_costs(document["costs"]),
        traces=traces,
        drafter=str(document["drafter"]),
        accept_next=None if document["accept_next"] is None else float(document["accept_next"]),
    )


def _costs_as_dict(costs: Costs) -> dict[str, Any]:
    return {field.name: _encoded(getattr(costs, field.name)) for field in dataclasses.fields(Costs)}


def _encoded(value: Any) -> Any:
    if isinstance(value, Duration):
        return {"samples_ns": list(value.samples)} | ({"spread": value.spread} if value.spread else {})
    if isinstance(value, Shared):
        return {"alone": _encoded(value.alone), "together": _encoded(value.together)}
    if isinstance(value, Mapping):
        return {str(number): _encoded(shared) for number, shared in sorted(value.items())}
    return value


def _costs(values: Mapping[str, Any]) -> Costs:
    found = dict(values)
    for name, decode in _DECODERS.items():
        found[name] = decode(found[name])
    if not found["passes"]:
        raise ValueError("no time of a target pass")
    return Costs(**found)


def _duration(values: Mapping[str, Any]) -> Duration:
    samples = tuple(int(sample) for sample in values["samples_ns"])
    if not samples or min(samples) < 0:
        raise ValueError(f"times must be at least 0, and at least one: {values['samples_ns']}")
    return Duration(samples, float(values.get("spread", 0.0)))


def _shared(values: Mapping[str, Any]) -> Shared:
    return Shared(_duration(values["alone"]), _duration(values["together"]))


def _shared_by_number(values: Mapping[str, Any]) -> dict[int, Shared]:
    return {int(number): _shared(shared) for number, shared in values.items()}


_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("passes", "tree_steps"), _shared_by_number),
    **dict.fromkeys(("draft_token", "host"), _shared),
    **dict.fromkeys(
        ("target_prefill", "draft_prefill", "advance", "rollback", "to_target", "to_draft"),
        _duration,
    ),
}
"""The fields of `Costs` that hold times."""
