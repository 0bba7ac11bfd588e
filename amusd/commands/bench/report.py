"""The document of `amusd bench` as tables for people."""

from __future__ import annotations

from typing import Any

from amusd.console import table

_MEBI = 1 << 20


def bench_text(document: dict[str, Any]) -> str:
    """Every measurement beside its floor or its peer."""
    parts = [
        _passes(document["target"], document["draft"]),
        _sampling(document["sampling"]),
        _decoding(document["decoding"]),
        _context(document["context"]),
        _links(document["transport"]) + "\n" + document["transport_choice"]["text"],
        _idle(document["pair"]["idle"]),
        _memory(document["pair"]["memory"]),
    ]
    return "\n\n".join(parts)


def _passes(target: dict[str, Any], draft: dict[str, Any]) -> str:
    def row(name: str, ms: float, floor_ms: float, ratio: float | None = None) -> tuple[str, ...]:
        return name, f"{ms:.2f}", f"{floor_ms:.2f}", f"{ms / floor_ms:.2f}", "" if ratio is None else f"{ratio:.2f}"

    floor_ms = target["floor_ms"]
    rows = [
        row(f"target, {width} rows", ms, floor_ms, target["ratio_to_narrowest"][width])
        for width, ms in target["forward_ms"].items()
    ]
    rows.append(row("target, fixed width", target["forward_ms_fixed"], floor_ms))
    rows += [row(f"draft step, {name}", step["step_ms"], step["floor_ms"]) for name, step in draft.items()]
    where = f"context of {target['context']} tokens; forward pass: {target['implementation']}"
    narrowest = next(iter(target["forward_ms"]))
    lines = [
        f"memory reads at {target['bandwidth_gb_s']:.1f} GB/s; {where}",
        table(("pass", "ms", "floor ms", "x floor", f"x {narrowest} row"), rows),
    ]
    lines += [
        f"a draft step of {name} takes 1/{1 / step['target_passes_per_step']:.1f} of a fixed target pass"
        for name, step in draft.items()
    ]
    return "\n".join(lines)


def _sampling(sampling: dict[str, Any]) -> str:
    rows = [(name, f"{ms:.3f}", _percent(sampling["share_of_pass"].get(name))) for name, ms in sampling["ms"].items()]
    return table((f"choosing {sampling['rows']} tokens", "ms", "of a pass, beyond argmax"), rows)


def _decoding(decoding: dict[str, Any]) -> str:
    names = {"fixed": "amusd, verify_width=fixed", "bucketed": "amusd, verify_width=bucketed"}
    rows = []
    for name, ms in decoding["ms_per_token"].items():
        speedup = decoding.get("speedup_vs_peer", {}).get(name)
        rows.append(
            (
                names.get(name, "transformers.generate"),
                f"{ms:.2f}",
                f"{1000 / ms:.1f}",
                f"{decoding['time_to_first_token_ms'][name]:.0f}",
                "" if speedup is None else f"{speedup:.2f}",
            )
        )
    return table(("plain decoding", "ms/token", "tokens/s", "first token ms", "x transformers"), rows)


def _context(context: dict[str, Any]) -> str:
    rows = [
        (
            length,
            f"{ms:.0f}",
            _ratio(context.get("prefill_ratio_to_peer", {}).get(length)),
            f"{context['pass_ms'][length]:.2f}",
            _ratio(context["pass_ratio_to_shortest"][length]),
            _ratio(context.get("peer_step_ms", {}).get(length)),
        )
        for length, ms in context["prefill_ms"].items()
    ]
    of_pass = f"pass of {context['rows']} rows ms"
    header = ("tokens of context", "prefill ms", "x transformers", of_pass, "x shortest", "transformers' step ms")
    return table(header, rows)


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _links(transport: dict[str, Any]) -> str:
    figures = ("one_way_us_p50", "one_way_us_p99", "poll_us")
    rows = [
        (name, *(f"{link[figure]:.1f}" if figure in link else "-" for figure in figures))
        for name, link in transport.items()
    ]
    return table(("link", "one way us p50", "p99", "empty poll us"), rows)


def _idle(idle: dict[str, Any]) -> str:
    rows = [
        (
            mode,
            f"{times['tokens_per_second']:.1f}",
            f"{times['time_to_first_token_ms']:.0f}",
            f"{times['target_pass_ms']:.2f}",
            _percent(times["target_between_passes"]),
            _percent(times["draft_between_steps"]),
        )
        for mode, times in idle.items()
    ]
    header = ("the pair", "tokens/s", "first token ms", "pass ms", "target between passes", "draft between steps")
    return table(header, rows)


def _memory(memory: dict[str, Any]) -> str:
    weights, caches = memory["weight_bytes"], memory["cache_bytes"]
    draft = next((name for name in weights if name != "target"), None)
    torch_bytes, transformers_bytes = memory["import_torch_bytes"], memory["import_transformers_bytes"]
    rows = []
    for role, name in (("target", "target"), ("draft", draft)):
        resident = memory[f"{role}_bytes"]
        if resident is None or name is None:
            continue
        figures = (resident, weights[name], caches[name], torch_bytes, transformers_bytes - torch_bytes)
        allowed = 1.35 * weights[name] + caches[name] + torch_bytes
        rows.append((role, *(f"{figure / _MEBI:.0f}" for figure in figures), f"{resident / allowed:.2f}"))
    header = ("resident MiB", "worker", "weights", "cache", "import torch", "+ transformers", "x allowance")
    return table(header, rows) + "\nallowance: 1.35 x weights + cache + import torch"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f} %"
