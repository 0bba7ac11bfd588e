"""Prompts: a text, a conversation or token ids."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from amusd.errors import ConfigError, ContextLengthError
from amusd.models.cached_model import CachedModel
from amusd.models.tokenizer import Conversation, Tokenizer, user_turn

Prompt: TypeAlias = str | Sequence[int] | Conversation
"""The user's message, a conversation (turns with `role` and `content`), or token ids."""


def is_list_of_prompts(prompt: object) -> bool:
    """Whether this is a list of texts, conversations or lists of token ids; or empty."""
    return isinstance(prompt, (list, tuple)) and (not prompt or isinstance(prompt[0], (str, list, tuple)))


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer, model: CachedModel, *, raw: bool, template: Mapping[str, Any]
) -> tuple[int, ...]:
    """Token ids of a prompt. Raises `ConfigError` for unknown ids, or no room for an answer."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], Mapping)):
        turns: Any = user_turn(prompt) if isinstance(prompt, str) else prompt
        text = "\n\n".join(turn["content"] for turn in turns)
        try:
            text.encode()
            token_ids = tuple(tokenizer.encode(text) if raw else tokenizer.encode_chat(turns, **template))
        except UnicodeEncodeError:
            raise ConfigError("prompt: half of a surrogate pair is no text") from None
    else:
        token_ids = tuple(map(operator.index, cast("Sequence[int]", prompt)))
    if not token_ids:
        raise ConfigError("prompt: has no tokens")
    if len(token_ids) >= model.max_length:
        raise ContextLengthError(
            f"prompt: {len(token_ids)} tokens leave no room in a context of {model.max_length} (max_model_len)"
        )
    if not 0 <= min(token_ids) <= max(token_ids) < model.vocab_size:
        raise ConfigError(f"prompt: token ids must be in [0, {model.vocab_size})")
    return token_ids
