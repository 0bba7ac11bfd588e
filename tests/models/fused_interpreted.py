"""Compares the Triton kernels of `fused_triton.py` with the torch ones, in Triton's interpreter (`TritonProcess`)."""

from __future__ import annotations

import torch

from amusd.models import fused


def rotation_case(
    rows: int, queries: int, keys: int, dim: int, *, has_norm: bool, dtype: torch.dtype
) -> dict[str, object]:
    generator = torch.Generator().manual_seed(rows + dim)
    joint = torch.randn((rows, queries + 2 * keys, dim), generator=generator).to(dtype)
    rotation = torch.polar(torch.ones(rows, dim // 2), torch.randn((rows, dim // 2), generator=generator))
    norm = torch.rand((queries + keys, dim), generator=generator) if has_norm else None
    slots = torch.randperm(40, generator=generator)[:rows]
    stored = [torch.full((2 * keys, 40, dim), 7.0, dtype=dtype) for _ in range(3)]
    from amusd.models import fused_triton

    expected = fused.rotate_and_store(joint, rotation, norm, stored[0], slots, queries, 1e-5)
    found = fused_triton.rotate_and_store(joint, rotation, norm, stored[1], slots, queries, 1e-5)
    alone = fused_triton.rotate_and_store(joint[-1:], rotation[-1:], norm, stored[2], slots[-1:], queries, 1e-5)
    return {
        "case": f"rotate {rows} {queries} {keys} {dim} {has_norm} {dtype}",
        "error": max(float((a - b).abs().max()) for a, b in ((expected, found), (stored[0], stored[1]))),
        "same_alone": torch.equal(alone[0], found[-1])
        and torch.equal(stored[2][:, slots[-1]], stored[1][:, slots[-1]]),
        "num_written": int((stored[1] != 7.0).any(2).any(0).sum()),
        "rows": rows,
    }


def activation_case(rows: int, columns: int, dtype: torch.dtype) -> dict[str, object]:
    gate_up = torch.randn((rows, 2 * columns), generator=torch.Generator().manual_seed(columns)).to(dtype)
    from amusd.models import fused_triton

    found = fused_triton.silu_and_multiply(gate_up)
    return {
        "case": f"silu {rows} {columns} {dtype}",
        "error": float((fused.silu_and_multiply(gate_up) - found).abs().max()),
        "same_alone": torch.equal(fused_triton.silu_and_multiply(gate_up[-1:])[0], found[-1]),
        "num_written": rows,
        "rows": rows,
    }


def compare() -> list[dict[str, object]]:
    return [
        rotation_case(8, 3, 1, 64, has_norm=False, dtype=torch.float32),
        rotation_case(3, 2, 2, 96, has_norm=True, dtype=torch.bfloat16),
        activation_case(2, 1000, torch.float32),
        activation_case(2, 1000, torch.bfloat16),
    ]
