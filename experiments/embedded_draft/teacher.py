"""The embedded target as transformers computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from amusd.models.embedded_target import embedded_target_path

TOP_K = 50
"""Sampled text comes from this many tokens at each step."""


def load_teacher(device: str) -> Any:
    """SmolLM2-135M-Instruct in bfloat16 on `device`, ready for inference."""
    model = AutoModelForCausalLM.from_pretrained(
        embedded_target_path(report=print), dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    return model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]


def load_tokenizer() -> Any:
    """Its tokenizer, with the chat template."""
    return AutoTokenizer.from_pretrained(embedded_target_path(report=print))


@torch.inference_mode()
def continue_rows(
    teacher: Any, rows: Sequence[Sequence[int]], *, temperature: float, max_new_tokens: int
) -> list[list[int]]:
    """What the target writes behind each row, its end-of-sequence token included. Temperature 0: greedy."""
    end = int(teacher.generation_config.pad_token_id or 0)
    width = max(len(row) for row in rows)
    padded = torch.tensor([[end] * (width - len(row)) + list(row) for row in rows], device=teacher.device)
    real = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=teacher.device)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": TOP_K} if temperature else {"do_sample": False}
    output = teacher.generate(
        padded, attention_mask=real, max_new_tokens=max_new_tokens, pad_token_id=end, top_p=1.0, **sampling
    )
    stops = stop_ids(teacher)
    return [_until(stops, row.tolist()) for row in output[:, width:]]


def stop_ids(teacher: Any) -> set[int]:
    """Ids that end a turn."""
    ends = teacher.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends}


def _until(stops: set[int], token_ids: list[int]) -> list[int]:
    for index, token_id in enumerate(token_ids):
        if token_id in stops:
            return token_ids[: index + 1]
    return token_ids
