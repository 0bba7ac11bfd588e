"""The facts that a measurement depends on, in words: machine, models, prompts, settings, and the command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from amusd.config import DrafterConfig, RunConfig
from amusd.config.commands import DEFAULT_PROMPTS
from amusd.settings import changed

EMBEDDED_TARGET = "SmolLM2-135M-Instruct (embedded)"
NOT_SHOWN = ("prompt", "run_dir", "output")
"""Keys that a comparison does not depend on; a prompt may be private."""


def facts_of(config: RunConfig, environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values, in reading order."""
    return [
        ("Machine", _machine(environment)),
        ("Devices", ", ".join(_devices(config))),
        ("Target", _target(config)),
        ("Drafter", "; ".join(_drafter(drafter) for drafter in config.engine().drafters)),
        ("Link", _link(config)),
        ("Prompts", prompts_name(config)),
        ("Answers", _answers(config)),
        ("Software", _software(environment)),
        ("Date", str(environment.get("date") or "not recorded")),
    ]


def machine_name(environment: Mapping[str, Any]) -> str:
    """The processor or the GPUs."""
    gpus = environment.get("gpus") or []
    cpu = environment.get("cpu") or {}
    return ", ".join(dict.fromkeys(gpu.split(",")[0] for gpu in gpus)) or cpu.get("model") or "an unnamed machine"


def models_name(config: RunConfig) -> str:
    """`target SmolLM2 with drafter ngram`."""
    drafters = ", ".join(_model(drafter.kind, drafter.model or drafter.factory) for drafter in config.engine().drafters)
    return f"target {config.hardware.synthetic or _target_model(config)}, drafter {drafters}"


def prompts_name(config: RunConfig) -> str:
    """The origin of the prompts, without their text."""
    workload = config.workload
    source = "prompts that come with amusd" if workload.path is None else f"prompts of {PurePath(workload.path).name}"
    number = workload.num_prompts or f"{DEFAULT_PROMPTS} (or fewer)"
    return f"the first {number} {source}{', without a chat template' if workload.raw else ''}"


def command_of(command: str, config: RunConfig) -> str:
    """The command line that asks for this configuration: what differs from the defaults, by key."""
    changes = changed(config, RunConfig()).items()
    overrides = (f"{key}={_value(value)}" for key, value in changes if key not in NOT_SHOWN)
    return shlex.join(["amusd", command, *overrides])


def _value(value: Any) -> str:
    """A value as the command line reads it. Texts are quoted where they would be read as something else."""
    if isinstance(value, str):
        quoted = len(value) > 1 and value[0] in "'\"" and value[-1] == value[0]
        return "'" + value.replace("'", "\\'") + "'" if quoted or value == "null" else value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _machine(environment: Mapping[str, Any]) -> str:
    cpu = environment.get("cpu") or {}
    features = "".join(f", {feature}" for feature in (cpu.get("features") or [])[-1:])
    parts = [f"{cpu.get('model', 'unknown processor')}{features}, {cpu.get('allowed_cores', '?')} cores"]
    return "; ".join([*parts, *(environment.get("gpus") or []), str(environment.get("platform", ""))]).rstrip("; ")


def _devices(config: RunConfig) -> Iterator[str]:
    if not config.hardware.devices:
        yield "chosen when the workers start"
        return
    *targets, draft = config.hardware.devices
    yield f"target on {', '.join(targets)}"
    yield f"draft on {draft}"
    if "cpu" in config.hardware.devices:
        count = config.hardware.num_threads
        yield "one thread each" if count == 1 else f"{count} threads each"


def _target(config: RunConfig) -> str:
    synthetic = config.hardware.synthetic
    model = _target_model(config) if synthetic is None else f"{synthetic}, random weights"
    return _in_dtype(model, config.target.dtype)


def _target_model(config: RunConfig) -> str:
    return EMBEDDED_TARGET if config.target.kind == "embedded" else _model(config.target.kind, config.target.model)


def _drafter(drafter: DrafterConfig) -> str:
    if drafter.kind == "synthetic":
        return f"synthetic, right with probability {drafter.accept:g}"
    if drafter.kind == "ngram":
        return f"ngram, {drafter.min_ngram} to {drafter.max_ngram} tokens"
    model = _model(drafter.kind, drafter.model or drafter.factory)
    return _in_dtype(model if drafter.num_layers is None else f"{model}, {drafter.num_layers} layers", drafter.dtype)


def _in_dtype(model: str, dtype: str) -> str:
    return model if dtype == "auto" else f"{model}, {dtype}"


def _model(kind: str, model: str | None) -> str:
    return kind if model is None else model


def _link(config: RunConfig) -> str:
    delay = config.transport.delay_ms
    return f"{config.transport.kind}, every message {delay:g} ms late" if delay else config.transport.kind


def _answers(config: RunConfig) -> str:
    sampling = config.sampling
    kind = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}, {sampling.rule}"
    return f"up to {sampling.max_new_tokens} tokens, {kind}, seed {sampling.seed}; verify_width={config.verify_width}"


def _software(environment: Mapping[str, Any]) -> str:
    packages = environment.get("packages") or {}
    named = {"amusd": environment.get("amusd"), "Python": environment.get("python")}
    named |= {name: packages.get(name) for name in ("torch", "transformers")}
    parts = [f"{name} {version}" for name, version in named.items() if version]
    if environment.get("commit"):
        parts.append(f"commit {environment['commit'][:12]}{'+changes' if '+' in environment['commit'] else ''}")
    return ", ".join(parts)
