"""`transformers.generate` in a process of its own, whose threads and cores are set before torch is loaded."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from amusd.errors import PeerError

ANSWER_SECONDS = 600.0
"""Longest that loading, or one answer, may take."""
ENDING_SECONDS = 10.0


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

        from amusd.models.transformers_models import quiet_transformers

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
        assistant: StockModel | None = None,
        prompt_lookup: int | None = None,
    ) -> list[int]:
        """Exactly `num_tokens` greedy tokens after `prompt`.

        `assistant` drafts for this model (transformers' assisted generation), or the prompt does: `prompt_lookup`
        tokens a round.
        """
        import torch
        from transformers import GenerationConfig

        from amusd.models.transformers_models import quiet_transformers

        settings = GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, pad_token_id=0, prompt_lookup_num_tokens=prompt_lookup
        )
        helper: dict[str, Any] = {} if assistant is None else {"assistant_model": assistant.model}
        ids = torch.tensor([prompt], device=self._device)
        with torch.inference_mode(), quiet_transformers():
            output = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, **helper)
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens


class StockTransformers:
    """The parent's end. `close` ends the process."""

    def __init__(self, target: Path, draft: Path, *, dtype: str, num_threads: int, cores: set[int]) -> None:
        """`cores`: what the process may run on; empty: all."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, str(target), str(draft), dtype, num_threads, cores)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    def generate(self, way: str, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], int]:
        """The tokens, and the nanoseconds they took in that process. Raises `PeerError`."""
        self._connection.send((way, list(prompt), num_tokens))
        tokens, duration_ns = self._receive()
        return tokens, duration_ns

    def close(self) -> None:
        """End the process; idempotent."""
        self._connection.close()
        self._process.join(ENDING_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self) -> Any:
        try:
            if self._connection.poll(ANSWER_SECONDS):
                return self._connection.recv()
        except (EOFError, OSError) as error:
            raise PeerError("the process with transformers has died; what it said is above") from error
        raise PeerError(f"the process with transformers did not answer within {ANSWER_SECONDS:.0f} s")


def _serve(connection: Connection, target: str, draft: str, dtype: str, num_threads: int, cores: set[int]) -> None:
    from amusd.runtime.cores import pin_to
    from launch.environment import set_environment

    pin_to(cores)
    set_environment(num_threads)
    import torch

    torch.set_num_threads(num_threads)
    model, assistant = (StockModel(path, dtype=dtype, device="cpu") for path in (target, draft))
    connection.send("loaded")
    while True:
        try:
            name, prompt, num_tokens = connection.recv()
        except EOFError:
            return
        way = WAYS[name]
        assistant.draft(way.draft_tokens)
        began = time.perf_counter_ns()
        tokens = model.generate(
            prompt, num_tokens, assistant=assistant if way.assisted else None, prompt_lookup=way.prompt_lookup
        )
        connection.send((tokens, time.perf_counter_ns() - began))
