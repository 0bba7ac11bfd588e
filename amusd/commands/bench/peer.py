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
        self.model: Any = model.to(device).eval().requires_grad_(requires_grad=False)
        # No end-of-sequence token, so that every run is as long as it should be; `generate` would take the model's.
        self.model.generation_config.eos_token_id = None
        self._device = device

    def draft(self, num_tokens: int | None) -> None:
        """Set how many tokens this model, as an assistant, proposes a round, however sure; None: its own choice."""
        config = self.model.generation_config
        config.num_assistant_tokens = num_tokens
        config.num_assistant_tokens_schedule = None if num_tokens is None else "constant"
        config.assistant_confidence_threshold = None if num_tokens is None else 0.0

    def generate(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        assistant: GeneratePeer | None = None,
        prompt_lookup: int | None = None,
    ) -> list[int]:
        """Exactly `num_tokens` greedy tokens after `prompt`.

        `assistant` drafts for this model (transformers' assisted generation), or the prompt does: `prompt_lookup`
        tokens a round.
        """
        from transformers import GenerationConfig

        settings = GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, pad_token_id=0, prompt_lookup_num_tokens=prompt_lookup
        )
        helper: dict[str, Any] = {} if assistant is None else {"assistant_model": assistant.model}
        ids = torch.tensor([prompt], device=self._device)
        with torch.inference_mode(), quiet_transformers():
            output = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, **helper)
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens


class PeerContext:
    """A context of fixed length as the stock model computes it. `prefill` comes first."""

    def __init__(self, peer: GeneratePeer, prompt: Sequence[int], length: int) -> None:
        """`prompt`: at least one token more than the context."""
        self._model = peer.model
        self._context = torch.tensor([prompt[:length]], device=peer.model.device)
        self._next = torch.tensor([prompt[length : length + 1]], device=peer.model.device)
        self._cache: Any = None

    def prefill(self) -> None:
        """Take in the context; no logits."""
        with torch.inference_mode(), quiet_transformers():
            output = self._model.base_model(input_ids=self._context, use_cache=True)
        self._cache = output.past_key_values
        output.last_hidden_state[0, -1, 0].item()  # waits for a device

    def step(self) -> None:
        """Choose the token after one more, which is then forgotten."""
        with torch.inference_mode(), quiet_transformers():
            output = self._model(input_ids=self._next, past_key_values=self._cache, use_cache=True)
            output.logits[0, -1].argmax().item()
            self._cache.crop(-1)
