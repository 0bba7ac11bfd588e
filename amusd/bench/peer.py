"""The same weights through `transformers.generate`: the baseline that users know, as they would run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from amusd.models.huggingface import quiet_transformers


class GeneratePeer:
    """A stock transformers model with its default attention, greedy."""

    def __init__(self, path: str, *, dtype: str, device: str) -> None:
        """`path`: folder or hub name of a checkpoint."""
        from transformers import AutoModelForCausalLM

        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=getattr(torch, dtype), trust_remote_code=False, use_safetensors=True
            )
        self._model: Any = model.to(device).eval().requires_grad_(requires_grad=False)
        self._device = device

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Exactly `num_tokens` greedy tokens after `prompt`."""
        from transformers import GenerationConfig

        # No end-of-sequence token, so that every run is as long as it should be.
        settings = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        ids = torch.tensor([prompt], device=self._device)
        with torch.inference_mode(), quiet_transformers():
            output = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens
