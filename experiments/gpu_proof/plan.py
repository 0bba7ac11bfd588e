"""The plan: what is measured, in which sizes and order, and the time limits. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amusd.config.engine import ModelShape
from amusd.errors import ConfigError
from amusd.settings import nearest

GPU, CPU = "cuda:0", "cpu"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes of all measurements on one kind of device."""

    device: str
    """The device that target and draft share."""
    target: ModelShape
    draft: ModelShape
    large: ModelShape
    """A slice of a model that would not fit on one device."""
    lengths: tuple[int, ...]
    """Prompt lengths in tokens; the width test takes the first one and the last two."""
    contexts: tuple[int, ...]
    """Tokens in the cache before a pass or step that is timed."""
    max_model_len: int
    """Longest sequence of the models that are timed alone."""
    rounds: int
    num_prompts: int
    num_tokens: int
    num_draws: int
    """Number of answers in the check of the ratio test's law."""
    num_messages: int
    accepts: tuple[float, ...] = (0.8, 0.6)
    """Acceptance rates of the synthetic drafter, one comparison each."""
    synchronous_lengths: tuple[int, ...] = (2, 4, 7)


SCALES = {
    GPU: Scale(
        device=GPU,
        target="llama-8b",
        draft="llama-1b",
        large="llama-70b-slice",
        lengths=(100, 1000, 4000, 30_000),
        contexts=(200, 4000, 30_000),
        max_model_len=32_768,
        rounds=40,
        num_prompts=6,
        num_tokens=128,
        num_draws=800,
        num_messages=4000,
    ),
    CPU: Scale(
        device=CPU,
        target="smollm2-135m",
        draft="smollm2-135m-slice",
        large="smollm2-135m-slice",
        lengths=(40, 120),
        contexts=(40, 120),
        max_model_len=256,
        rounds=4,
        num_prompts=1,
        num_tokens=12,
        num_draws=200,
        num_messages=200,
        synchronous_lengths=(2, 4),
    ),
}


@dataclass(frozen=True, slots=True)
class Part:
    """One process."""

    name: str
    group: str
    """Parts of one group fit into one command of ten minutes."""
    function: str
    """`module:function` in this folder; takes a `Job`."""
    seconds: int
    """Time limit on a GPU; then it is killed, with all that it has started."""
    does: str

    def limit(self, device: str) -> int:
        """The limit on the device of the run. A CPU, on which the proof itself is tested, may be slow and busy."""
        return self.seconds * (1 if device == GPU else 6)


PARTS = (
    Part("smoke", "smoke", "smoke:smoke", 90, "whether each mechanism works at all: compiler, kernels, graphs, NCCL"),
    Part("versions", "smoke", "environment:versions", 60, "machine, versions, bandwidth of the memory"),
    Part("logits", "basics", "correctness:logits", 70, "logits beside those of float32 on the CPU"),
    Part("tests", "basics", "correctness:device_tests", 90, "the suite's tests that need a GPU"),
    Part("neighbours", "basics", "correctness:neighbours", 45, "the same bits whatever the other sequences"),
    Part("width", "basics", "correctness:width", 110, "the same bits whatever the block, behind short prompts"),
    Part("modes", "basics", "modes:modes", 140, "the same tokens in every mode; a draft that is killed"),
    Part("passes", "basics", "speed:passes", 140, "passes and steps beside the bandwidth, host time, prefill"),
    Part("compare_high", "engine", "compare:high", 200, "all modes, high acceptance"),
    Part("batch", "engine", "modes:batch", 110, "the same tokens in a batch of four sequences"),
    Part("graphs", "engine", "environment:graphs", 130, "captured graphs of both roles: number, time, memory"),
    Part("links", "engine", "speed:links", 60, "one-way times of messages"),
    Part("projection", "engine", "projection:projection", 80, "two devices, simulated on the times of one"),
    Part("compare_low", "long", "compare:low", 190, "all modes, low acceptance"),
    Part("long_width", "long", "correctness:long_width", 90, "the same bits whatever the block, behind a long prompt"),
    Part("long_graphs", "long", "environment:long_graphs", 85, "graphs of the longest contexts and of a larger model"),
)
"""In order of value. A group is one command."""
GROUPS = tuple(dict.fromkeys(part.group for part in PARTS))


def chosen(names: Sequence[str]) -> tuple[Part, ...]:
    """The parts of these parts or groups, in the order of the plan; all if none is named. Raises `ConfigError`."""
    known = {part.name for part in PARTS} | set(GROUPS)
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--parts={name}: no such part or group; there are {', '.join(sorted(known))}{nearest(name, known)}"
            )
    return tuple(part for part in PARTS if not names or part.name in names or part.group in names)
