"""`transformers.generate`, assisted generation and prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.peers.process import Models, Runtime

DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class Way:
    """Generate plainly, with an assistant (`draft_tokens` a round; None: as transformers chooses), or by lookup."""

    assisted: bool = False
    draft_tokens: int | None = None
    prompt_lookup: int | None = None


WAYS = {
    "plain": Way(),
    "assisted, its own schedule": Way(assisted=True),
    "assisted, 2 tokens": Way(assisted=True, draft_tokens=2),
    "assisted, 4 tokens": Way(assisted=True, draft_tokens=4),
    "prompt lookup, 4 tokens": Way(prompt_lookup=4),
    "prompt lookup, 10 tokens": Way(prompt_lookup=10),
}


class StockModel:
    """A stock transformers model with its default attention, greedy."""

    def __init__(self, path: str, *, dtype: str, device: str) -> None:
        """`path`: folder or hub name of a checkpoint."""
        import torch
        from transformers import AutoModelForCausalLM

        from amusd.checkpoints.transformers_models import quiet_transformers

        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=getattr(torch, dtype), trust_remote_code=False, use_safetensors=True
            )
        self.model: Any = model.to(device).eval().requires_grad_(requires_grad=False)
        # No end-of-sequence token, so that every answer has the full length; `generate` would take the model's.
        self.model.generation_config.eos_token_id = None
        self._device = device

    def draft(self, num_tokens: int | None) -> None:
        """Set how many tokens this model proposes in a round as an assistant, however unsure; None: its own choice."""
        config = self.model.generation_config
        config.num_assistant_tokens = num_tokens
        config.num_assistant_tokens_schedule = None if num_tokens is None else "constant"
        config.assistant_confidence_threshold = None if num_tokens is None else 0.0

    def generate(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        assistant: StockModel | None = None,
        prompt_lookup: int | None = None,
    ) -> list[int]:
        """Exactly `num_tokens` greedy tokens after `prompt`.

        `assistant` drafts for this model (transformers' assisted generation), or the prompt does: `prompt_lookup`
        tokens a round.
        """
        import torch
        from transformers import GenerationConfig

        from amusd.checkpoints.transformers_models import quiet_transformers

        settings = GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, pad_token_id=0, prompt_lookup_num_tokens=prompt_lookup
        )
        helper: dict[str, Any] = {} if assistant is None else {"assistant_model": assistant.model}
        ids = torch.tensor([prompt], device=self._device)
        with torch.inference_mode(), quiet_transformers():
            output = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, **helper)
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens


class Transformers(Runtime):
    """transformers with the draft as its assistant."""

    name = "transformers"
    package = "transformers"
    ways = WAYS

    def __init__(self, models: Models, num_threads: int) -> None:
        """See `Runtime`."""
        import torch

        torch.set_num_threads(num_threads)
        target, draft = (StockModel(str(path), dtype=DTYPE, device="cpu") for path in (models.target, models.draft))
        self._target, self._draft = target, draft

    def generate(self, way: str, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """See `Runtime`."""
        chosen = self.ways[way]
        self._draft.draft(chosen.draft_tokens)
        assistant = self._draft if chosen.assisted else None
        return self._target.generate(prompt, num_tokens, assistant=assistant, prompt_lookup=chosen.prompt_lookup)
