"""The pair at work, in processes of its own: how long each worker stands idle, and how much memory each holds.

Started as a child so that nothing but the target's worker is in the target's memory. The order of imports is part of
the measurement: what `import torch` alone costs is read first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from amusd.child import command_of
from amusd.config import BenchConfig, DecodingConfig, EngineConfig, SamplingParams
from amusd.errors import ConfigError, PeerFailedError
from amusd.settings import from_mapping, to_mapping
from amusd.types import Mode, Role

PAIR_SECONDS = 900.0
"""Longest that the whole measurement may take."""
_WARM_UP_TOKENS = 8
_SENTENCES = (
    "The harbour master keeps a notebook in which he writes down every ship that enters, its cargo, and the weather. ",
    "On Tuesday he noted two fishing boats, a ferry that was late, and a tanker that waited outside for the tide. ",
    "His daughter asked him why he never wrote about the birds, and he answered that nobody had ever asked for them. ",
)


def measure_pair(config: EngineConfig, bench: BenchConfig) -> dict[str, Any]:
    """Run the pair in child processes; returns the `pair` part of the report.

    Raises `ConfigError` for what no pair can work with, `PeerFailedError` for any other failure.
    """
    orders = {"config": to_mapping(config), "bench": to_mapping(bench)}
    child = subprocess.Popen(command_of(__name__), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = child.communicate(json.dumps(orders), timeout=PAIR_SECONDS)
        if not output:
            raise PeerFailedError(
                f"the pair that was measured ended with exit code {child.returncode} and no result; what it said on "
                "standard error is above"
            )
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        if "mistake" in result:
            raise ConfigError(result["mistake"])
    except (subprocess.TimeoutExpired, ValueError) as error:
        raise PeerFailedError(f"the pair that was measured ended without a result: {error}") from error
    finally:
        child.kill()
        child.wait()
    return result


def resident_bytes(pid: int | str = "self") -> int | None:
    """Resident memory of a process; None where the system does not tell (no /proc)."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def english(encode: Callable[[str], Sequence[int]], num_tokens: int) -> list[int]:
    """`num_tokens` tokens of plain English."""
    text = ""
    token_ids: list[int] = []
    while len(token_ids) < num_tokens:
        text += "".join(_SENTENCES)
        token_ids = list(encode(text))
    return token_ids[:num_tokens]


def main() -> None:
    """The child's whole life."""
    orders = json.loads(sys.stdin.read())
    try:
        report = _measured(orders)
    except ConfigError as error:
        report = {"mistake": str(error)}
    sys.stdout.write(json.dumps(report) + "\n")


def _measured(orders: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch_bytes = resident_bytes()
    import transformers.modeling_utils  # noqa: F401 - what loading any model imports; its cost is the measurement

    transformers_bytes = resident_bytes()
    from amusd.engine import Engine
    from amusd.runtime.cores import allowed_cores, cores_for, pin_to
    from amusd.runtime.devices import device_of

    config = from_mapping(EngineConfig, orders["config"])
    allowed = allowed_cores()
    with Engine.start(config) as engine:
        if device_of(config, Role.TARGET) == "cpu":
            pin_to(cores_for(Role.TARGET, allowed, config.hardware))
        torch.set_num_threads(config.hardware.num_threads)
        idle = _idle_fractions(engine, from_mapping(BenchConfig, orders["bench"]))
        return {
            "idle": idle,
            "memory": {
                "import_torch_bytes": torch_bytes,
                "import_transformers_bytes": transformers_bytes,
                "target_bytes": resident_bytes(),
                "draft_bytes": None if engine.draft_pid is None else resident_bytes(engine.draft_pid),
            },
        }


def _idle_fractions(engine: Any, bench: BenchConfig) -> dict[str, Any]:
    """Idle time of both workers by mode, relative to their work; waiting that the policy chose is left out."""
    from amusd.tracing.metrics import total

    prompt = english(engine.tokenizer.encode, bench.context_length)
    found: dict[str, list[Any]] = {mode.value: [] for mode in Mode}
    for number in range(1 + bench.num_pair_prompts):
        for mode in Mode:
            params = SamplingParams(
                max_new_tokens=bench.num_pair_tokens if number else _WARM_UP_TOKENS, ignore_eos=True
            )
            rotated = (*prompt[number:], *prompt[:number])  # the same length, another text
            answer = engine.generate(rotated, params, decoding=DecodingConfig(mode=mode))
            if number:
                found[mode.value].append(answer.metrics)
    return {mode: _idle_of(total(parts)) for mode, parts in found.items()}


def _idle_of(metrics: Any) -> dict[str, Any]:
    gaps = metrics.total_ns - metrics.prefill_ns - metrics.pass_ns - metrics.wait_ns
    draft = metrics.draft
    return {
        "target_between_passes": gaps / metrics.pass_ns,
        "target_pass_ms": metrics.pass_ns / metrics.num_passes / 1e6,
        "draft_between_steps": None
        if draft is None
        else (draft.open_ns - draft.busy_ns - draft.wait_ns) / draft.busy_ns,
        "tokens_per_second": 1e9 * metrics.num_tokens / metrics.total_ns,
        "time_to_first_token_ms": metrics.first_token_ns / 1e6 / metrics.num_prompts,
    }
