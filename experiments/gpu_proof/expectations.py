"""The table of what is expected, why, and what was measured: in the README for an H200, in a report for its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from amusd.config.engine import ModelShape
from experiments.gpu_proof.plan import GPU, SCALES
from experiments.gpu_proof.predictions import (
    DRAFT,
    DRAFT_SHARE,
    H200,
    HOST_MS,
    TARGET,
    Device,
    cache_bytes,
    pass_ms,
    plain_tokens_per_second,
    prefill_ms,
    synchronous_speedup,
    two_device_speedup,
    weight_bytes,
)
from experiments.gpu_proof.records import Record, find, is_of

ABOUT, AT_MOST, AT_LEAST, EXACTLY = "about", "at most", "at least", "exactly"


AWAITS = "awaits a GPU"


@dataclass(frozen=True, slots=True)
class Expectation:
    """One line of the table."""

    part: str
    what: str
    unit: str
    bound: str
    value: Callable[[Device], float]
    reasoning: str
    measured: Callable[[Sequence[Record]], float | None]
    """From the measurements of its part; None where they do not say."""


def _field(name: str, kind: str, **wanted: Any) -> Callable[[Sequence[Record]], float | None]:
    def look(records: Sequence[Record]) -> float | None:
        found = find(records, kind, **wanted)
        value = None if found is None else found.get(name)
        return None if value is None else float(value)

    return look


def _share(top: str, bottom: str, kind: str, **wanted: Any) -> Callable[[Sequence[Record]], float | None]:
    """Percent of the sums over all measurements of this kind."""

    def look(records: Sequence[Record]) -> float | None:
        own = [record for record in records if is_of(record, kind, wanted) and top in record]
        whole = sum(record[bottom] for record in own)
        return 100 * sum(record[top] for record in own) / whole if whole else None

    return look


def _worst(name: str, kind: str, **wanted: Any) -> Callable[[Sequence[Record]], float | None]:
    """The largest of all measurements of this kind."""

    def look(records: Sequence[Record]) -> float | None:
        own = [record for record in records if is_of(record, kind, wanted)]
        return max((float(record[name]) for record in own if record.get(name) is not None), default=None)

    return look


def _not_empty(records: Sequence[Record]) -> float | None:
    """Percent of the workers whose replays compute something."""
    own = [record["are_not_empty"] for record in records if record["kind"] == "graphs"]
    return 100 * sum(own) / len(own) if own else None


def _beyond_weights(records: Sequence[Record]) -> float | None:
    """GB that are reserved and not allocated, once all is captured: workspaces and what graphs keep."""
    own = [r["reserved_gb"] - r["allocated_gb"] for r in records if r["kind"] == "graphs" and "reserved_gb" in r]
    return max(own, default=None)


def _identical(records: Sequence[Record]) -> float | None:
    own = [
        record["identical_to_autoregressive"]
        for record in records
        if record["kind"] == "compare" and record["mode"] != "autoregressive"
    ]
    whole = sum(one["num_prompts"] for one in own)
    return 100 * sum(one["num_identical"] for one in own) / whole if whole else None


def _compared(name: str, accept: float, mode: str) -> Callable[[Sequence[Record]], float | None]:
    return _field(name, "compare", accept=accept, sampling="greedy", mode=mode)


def _gigabytes(shape: ModelShape, context: int) -> str:
    weights, cache = weight_bytes(shape) / 1e9, cache_bytes(shape, context) / 1e9
    return f"{weights:.3g} GB of weights, {cache:.2f} GB of keys and values"


def _constant(value: float) -> Callable[[Device], float]:
    return lambda _device: value


def _smoke() -> list[Expectation]:
    return [
        Expectation("smoke", "mechanisms that work at all", "%", EXACTLY, _constant(100),
                    "each was tested without a GPU: by doubles, Triton's interpreter or gloo", _holding),
    ]  # fmt: skip


def _holding(records: Sequence[Record]) -> float | None:
    own = [record["holds"] for record in records if record["kind"] == "smoke"]
    return 100 * sum(own) / len(own) if own else None


def _graphs() -> list[Expectation]:
    return [
        Expectation("graphs", "graphs of a worker", "", AT_MOST, _constant(16),
                    "one for each number of rows and kind of choice: nothing of a shape depends on the context",
                    _worst("number", "graphs")),
        Expectation("graphs", "workers whose replays compute something", "%", EXACTLY, _constant(100),
                    "graphs are captured on the worker's own device", _not_empty),
        Expectation("graphs", "memory beyond weights, caches and buffers", "GB", AT_MOST, _constant(1.0),
                    "one memory pool and one stream for all graphs of a worker; a cuBLAS workspace of 32 MiB",
                    _beyond_weights),
        Expectation("graphs", "time to capture a worker's graphs", "s", AT_MOST, _constant(30.0),
                    "3 runs of 400 launches of 10 us for each of 16 graphs are 0.2 s; compiling kernels takes the rest",
                    _worst("capture_seconds", "graphs")),
    ]  # fmt: skip


def _correctness() -> list[Expectation]:
    return [
        Expectation("logits", "float32: largest difference from the CPU", "", AT_MOST, _constant(1e-3),
                    "sums of 512 numbers around 1 in another order; TF32 is off",
                    _worst("max_difference", "logits", dtype="float32")),
        Expectation("logits", "bfloat16: the same", "", AT_MOST, _constant(0.2),
                    "8 bits of mantissa, 3 layers: some 1 % of logits whose standard deviation is about 1; 5 sigma",
                    _worst("max_difference", "logits", dtype="bfloat16")),
        Expectation("width", "rows with the same bits in any block, 100 to 30,000 tokens", "%", EXACTLY, _constant(100),
                    "one shape for all blocks; keys in splits of fixed positions",
                    _share("num_equal", "num_rows", "width")),
        Expectation("neighbours", "sequences with the same bits alone and among others", "%", EXACTLY, _constant(100),
                    "a program for each sequence and split; none reads another's keys",
                    _share("num_equal", "num_sequences", "neighbours")),
        Expectation("modes", "answers equal to plain decoding's, small pair", "%", EXACTLY, _constant(100),
                    "the width is fixed and the noise a function of seed and position",
                    _share("num_identical", "num_prompts", "modes")),
        Expectation("modes", "p-value of the ratio test's law", "", AT_LEAST, _constant(1e-4),
                    "it is uniform if the law holds: one run in 10,000 is below", _field("p_value", "law")),
        Expectation("modes", "answers equal to plain decoding's, the draft killed", "%", EXACTLY, _constant(100),
                    "a lost draft costs time and no token", _share("num_exact", "num_answers", "killed")),
        Expectation("modes", "candidates of the next draft that are accepted", "", AT_LEAST, _constant(1),
                    "the first answer behind its return uses it", _field("accepted_after", "killed")),
        Expectation("modes", "from the kill to the next draft", "s", AT_MOST, _constant(40),
                    "a process imports torch and transformers (15 s), loads, captures", _field("seconds", "killed")),
        Expectation("batch", "answers of four sequences at once equal to those alone", "%", EXACTLY, _constant(100),
                    "all passes of a memory have one shape", _share("num_identical", "num_prompts", "batch")),
        Expectation("tests", "exit code of the suite's GPU tests", "", EXACTLY, _constant(0), "they pass",
                    _field("exit_code", "tests")),
    ]  # fmt: skip


def _speed() -> list[Expectation]:
    def one_pass(context: int) -> Expectation:
        return Expectation(
            "passes", f"pass of 8 rows of the 8B target behind {context} tokens", "ms", ABOUT,
            lambda device: pass_ms(TARGET, context, device),
            f"{_gigabytes(TARGET, context)}, read at 85 and 50 % of the bandwidth; 256 small kernels of 2 us",
            _field("ms", "pass", context=context, rows=8),
        )  # fmt: skip

    def one_step(context: int) -> Expectation:
        return Expectation(
            "passes", f"step of the 1B draft behind {context} tokens", "ms", ABOUT,
            lambda device: pass_ms(DRAFT, context, device),
            f"{_gigabytes(DRAFT, context)}, read likewise; 128 small kernels",
            _field("ms", "step", context=context),
        )  # fmt: skip

    contexts = SCALES[GPU].contexts
    return [
        *(one_pass(context) for context in contexts),
        *(one_step(context) for context in contexts),
        Expectation("passes", "host between two passes, greedy", "ms", AT_MOST, _constant(HOST_MS),
                    "Python alone: no call of the device, one message",
                    _field("between_ms", "host", sampling="greedy")),
        Expectation("passes", "what top-p adds to a pass", "ms", AT_MOST, _constant(0.5),
                    "64 KB are copied, 1,024 columns a row filtered; 8 whole rows take a CPU 2 to 3 ms",
                    _added_by_filters),
        Expectation("passes", "prefill of the 8B target, 4,096 tokens", "tokens/s", ABOUT,
                    lambda device: 4096e3 / prefill_ms(TARGET, 4096, device),
                    "products at half of 989 TFLOP/s, or reading the weights; attention at a quarter",
                    _field("tokens_per_second", "prefill", role="target")),
        Expectation("links", "message through shared memory, one way", "us", AT_MOST, _constant(20.0),
                    "encode, copy, wake: no system call while the receiver spins",
                    _field("p50_us", "link", link="shared_memory")),
        Expectation("links", "message through gloo on loopback, one way", "us", AT_MOST, _constant(300.0),
                    "two hand-overs between threads, and TCP", _field("p50_us", "link", link="gloo")),
    ]  # fmt: skip


def _added_by_filters(records: Sequence[Record]) -> float | None:
    times = [find(records, "host", sampling=sampling) for sampling in ("filters", "greedy")]
    if None in times:
        return None
    filters, greedy = (time["between_ms"] + time["pass_ms"] for time in times if time is not None)
    return float(filters - greedy)


def _comparisons() -> list[Expectation]:
    def of(accept: float) -> list[Expectation]:
        part = "compare_high" if accept == SCALES[GPU].accepts[0] else "compare_low"
        return [
            Expectation(part, f"best synchronous over plain, acceptance {accept:g}", "x", ABOUT,
                        lambda device: synchronous_speedup(accept, device),
                        "closed form: tokens of a block over its steps, the pass, two messages of 20 us",
                        _compared("speedup_vs_autoregressive", accept, "synchronous")),
            Expectation(part, f"asynchronous over best synchronous on one device, acceptance {accept:g}", "x", ABOUT,
                        _constant(DRAFT_SHARE),
                        "drafting in vain takes the target's time: one device is not what it is for",
                        _compared("speedup_vs_best_synchronous", accept, "asynchronous")),
        ]  # fmt: skip

    def projected(accept: float) -> Expectation:
        return Expectation("projection",
                           f"simulated: `auto` over plain on two devices, acceptance {accept:g}", "x", AT_LEAST,
                           lambda device: two_device_speedup(accept, device),
                           "closed form of the best chain; what branching adds comes on top",
                           _field("speedup", "projection", accept=accept, policy="auto"))  # fmt: skip

    high, low = SCALES[GPU].accepts
    return [
        Expectation("compare_high", "plain decoding of the 8B target", "tokens/s", ABOUT, plain_tokens_per_second,
                    "a pass and 0.1 ms of host", _compared("tokens_per_second", high, "autoregressive")),
        *of(high),
        *of(low),
        Expectation("compare_high", "answers of both comparisons equal to plain decoding's", "%", EXACTLY,
                    _constant(100),
                    "as of the small pair; greedy, temperature 0.7, top-p 0.95", _identical),
        *(projected(accept) for accept in (high, low)),
    ]  # fmt: skip


EXPECTATIONS: tuple[Expectation, ...] = (
    *_smoke(),
    *_graphs(),
    *_correctness(),
    *_speed(),
    *_comparisons(),
)


def as_text(value: float, unit: str) -> str:
    """Three digits, and the unit."""
    digits = f"{value:,.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.3g}"
    return f"{digits} {unit}".rstrip()


def table(device: Device, measured: Callable[[Expectation], str]) -> str:
    """The table in Markdown: part, what, expected on `device`, reasoning, measured."""
    lines = [f"| part | what | expected on one {device.name} | reasoning | measured |", "| --- " * 5 + "|"]
    for one in EXPECTATIONS:
        expected = f"{one.bound} {as_text(one.value(device), one.unit)}"
        lines.append(f"| {one.part} | {one.what} | {expected} | {one.reasoning} | {measured(one)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(H200, lambda _: AWAITS))
