"""The embedded target, computed by transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from amusd.checkpoints.embedded_target import embedded_target_path
from amusd.models.linear import fastest_dtype


def load_teacher(device: str) -> Any:
    """SmolLM2-135M-Instruct on `device`, ready for inference: in bfloat16, or float32 on CPUs that lack it."""
    model = AutoModelForCausalLM.from_pretrained(
        embedded_target_path(),
        dtype=getattr(torch, fastest_dtype(torch.device(device))),
        attn_implementation="sdpa",
    )
    return model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]


def stop_ids(teacher: Any) -> set[int]:
    """Ids that end a turn."""
    ends = teacher.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends}
