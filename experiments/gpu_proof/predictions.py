"""What each part is expected to measure, written down before any GPU has run it: arithmetic of a shape and a device.

The figures that the arithmetic rests on are the constants below. None was measured here; each has its reason beside it.
`expectations.py` makes the table of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from amusd.config.engine import ModelShape
from amusd.models.synthetic import SHAPES
from experiments.closed_forms import best_chain, best_synchronous
from experiments.gpu_proof.plan import GPU, SCALES

WEIGHT_EFFICIENCY = 0.85
"""Share of the bandwidth that products of a few rows reach while they read weights."""
CACHE_EFFICIENCY = 0.5
"""The same of attention over split keys: two kernels a layer, short ones at a short context."""
SMALL_KERNELS_PER_LAYER = 6
"""Norms, rotation, cache, attention and its sum, activation: what is left beside four products once they are fused."""
KERNEL_MS = 0.002
"""Of a small kernel inside a graph, launch included."""
HOST_MS = 0.1
"""Of Python between two passes: verify, commit, decide, send."""
COMPUTE_EFFICIENCY = 0.5
"""Of the peak that a prompt's products reach; its attention reaches half of that."""
LINK_MS = 0.02
"""One way through shared memory, both ends at work."""
DRAFT_SHARE = 0.85
"""Of the best synchronous speed that asynchronous decoding keeps on one device, whose time drafting in vain takes."""

_BF16 = 2
TARGET: ModelShape = SCALES[GPU].target
DRAFT: ModelShape = SCALES[GPU].draft
_LENGTHS = SCALES[GPU].synchronous_lengths


@dataclass(frozen=True, slots=True)
class Device:
    """What a GPU's data sheet says."""

    name: str
    terabytes_per_second: float
    teraflops: float
    """Dense bfloat16."""


H100 = Device("H100", 3.35, 989.0)
H200 = Device("H200", 4.8, 989.0)
DEVICES = (H100, H200)


def device_of(name: str, measured_gb_s: float) -> Device:
    """The device of this name; one that is not known has the bandwidth that was measured, and an H100's speed."""
    known = next((device for device in DEVICES if re.search(rf"\b{device.name}\b", name)), None)
    return known or Device(name, measured_gb_s / 1000, H100.teraflops)


# Bytes and floating-point operations of a shape


def layer_parameters(shape: ModelShape) -> int:
    """Of the matrices of one layer."""
    given = SHAPES[shape]
    hidden, dim = given["hidden_size"], _head_dim(shape)
    queries, keys = given["num_attention_heads"] * dim, given["num_key_value_heads"] * dim
    return int(hidden * (2 * queries + 2 * keys) + 3 * hidden * given["intermediate_size"])


def weight_bytes(shape: ModelShape) -> int:
    """That one pass reads in bfloat16: all layers and the head, but a row of the embedding. Norms are left out."""
    given = SHAPES[shape]
    return _BF16 * (given["num_hidden_layers"] * layer_parameters(shape) + given["vocab_size"] * given["hidden_size"])


def cache_bytes(shape: ModelShape, context: int) -> int:
    """Of the keys and values that one pass reads in bfloat16."""
    given = SHAPES[shape]
    return _BF16 * 2 * given["num_hidden_layers"] * given["num_key_value_heads"] * _head_dim(shape) * context


def _head_dim(shape: ModelShape) -> int:
    given = SHAPES[shape]
    return int(given.get("head_dim", given["hidden_size"] // given["num_attention_heads"]))


# Times


def pass_ms(shape: ModelShape, context: int, device: Device) -> float:
    """Of up to 8 rows: weights, then keys and values, then small kernels."""
    read_ms = weight_bytes(shape) / (WEIGHT_EFFICIENCY * device.terabytes_per_second) / 1e9
    attend_ms = cache_bytes(shape, context) / (CACHE_EFFICIENCY * device.terabytes_per_second) / 1e9
    return read_ms + attend_ms + SHAPES[shape]["num_hidden_layers"] * SMALL_KERNELS_PER_LAYER * KERNEL_MS


def prefill_ms(shape: ModelShape, length: int, device: Device) -> float:
    """Of a prompt without the token behind it: its products or the reading of the weights, and causal attention."""
    given = SHAPES[shape]
    layers = given["num_hidden_layers"]
    products = 2 * layers * layer_parameters(shape) * length
    attention = 2 * layers * given["num_attention_heads"] * _head_dim(shape) * length**2
    per_ms = COMPUTE_EFFICIENCY * device.teraflops * 1e9
    read_ms = weight_bytes(shape) / (WEIGHT_EFFICIENCY * device.terabytes_per_second) / 1e9
    return max(read_ms, products / per_ms) + attention / (per_ms / 2)


def plain_tokens_per_second(device: Device) -> float:
    """Of the target alone at a short context."""
    return 1000 / (pass_ms(TARGET, 200, device) + HOST_MS)


def synchronous_speedup(accept: float, device: Device) -> float:
    """Of the best block length over plain decoding; the two take turns, on one device as on two."""
    ratio, overhead = _turns(device)
    return best_synchronous(accept, ratio, _LENGTHS, overhead=overhead)[0]


def two_device_speedup(accept: float, device: Device) -> float:
    """Of the best chain over plain decoding on two devices: what `auto`, which branches, should reach at least."""
    ratio, overhead = _turns(device)
    return best_chain(accept, ratio, (0, 1, 2, 4), delay=overhead / 2, restart_loss=0.5)[0]


def _turns(device: Device) -> tuple[float, float]:
    """Draft steps in a target pass, and two messages as a share of it."""
    whole = pass_ms(TARGET, 200, device) + HOST_MS
    return whole / pass_ms(DRAFT, 200, device), 2 * LINK_MS / whole
