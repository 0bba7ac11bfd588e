"""Text to token ids and back, whole or token by token."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec
from tokenizers import Tokenizer as Backend

from amusd.checkpoints.checkpoint import find_checkpoint, one_line_errors, read_json
from amusd.checkpoints.configuration import PLAIN, load_config
from amusd.checkpoints.vocabulary import TokenText
from amusd.errors import ConfigError, ContextLengthError
from amusd.files import TOKENIZER

_GENERATION = "generation_config.json"
_REPLACEMENT = "\ufffd"
_CONTEXT = 4  # tokens of a prompt that are decoded at least
_MAX_WINDOW = 256  # tokens re-decoded at most; only text that is not UTF-8 comes near
_METASPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_RESERVED = frozenset({"self", "messages", "turns", "conversations", "chat_template", "return_assistant_tokens_mask"})
"""Variables of a chat template, and arguments of its rendering, that a caller cannot set."""
_COMPOSED = 4
"""Most characters that Unicode's normal forms join to one."""

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
"""Turns with `role`, `content` and further keys of the chat template."""
Prompt: TypeAlias = str | Sequence[int] | Conversation
"""The user's message, a conversation, or token ids."""


def user_turn(text: str) -> Conversation:
    """A conversation of one message."""
    return ({"role": "user", "content": text},)


class Tokenizer:
    """Text to token ids and back, of one model family."""

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str] = MappingProxyType({}),
        template: str | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        num_ids: int | None = None,
        *,
        is_plain: bool = False,
    ) -> None:
        """`special_tokens`: by transformers' names. `template`: for chats. `eos_token_ids`: besides `eos_token`.

        `num_ids`: the model's, with padding; None: the tokenizer's. `is_plain`: the template needs only jinja.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend, self._special_tokens, self._template = backend, special_tokens, template
        self.has_chat_template = bool(template and template.strip())
        self._is_plain = is_plain
        self.num_ids = backend.get_vocab_size() if num_ids is None else num_ids
        self.eos_token_ids = eos_token_ids | _as_ids(backend.token_to_id(special_tokens.get("eos_token", "")))
        layout = msgspec.json.decode(backend.to_str())
        self._added = backend.get_added_tokens_decoder()
        self._byte_of = _byte_of_character() if '"ByteLevel"' in json.dumps(layout.get("decoder")) else {}
        vocab, model = backend.get_vocab(), layout["model"]
        spells_all = model["type"] == "BPE" and (self._byte_of or model.get("byte_fallback"))
        self._most_characters = _COMPOSED * max(map(len, vocab)) if spells_all else math.inf
        """Most characters of a token, blanks aside."""
        content = {"vocab": vocab, "added": sorted(token.content for token in self._added.values())}
        content["merges"] = model.get("merges", [])
        self.fingerprint: str = hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()
        """Hash of vocabulary, merges and added tokens; if equal, ids name the same tokens."""

    def encode(self, text: str, max_length: int | None = None, *, special: bool = True) -> list[int]:
        """Token ids of raw text, with the model's leading special tokens if `special`.

        Raises `ContextLengthError` for a text with so many characters that it has at least `max_length` tokens.
        """
        num_characters = len("".join(text.split()))  # a token may be any number of blanks
        if max_length is not None and num_characters >= max_length * self._most_characters:
            raise ContextLengthError(
                f"prompt: {len(text)} characters leave no room in max_model_len={max_length} tokens"
            )
        text.encode()  # raises UnicodeEncodeError
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=special)  # other threads go on
        return list(encoding.ids)

    def encode_chat(
        self, turns: Conversation, options: Mapping[str, Any] | None = None, max_length: int | None = None
    ) -> list[int]:
        """Token ids of the rendered chat template; without a template, of the contents joined by empty lines.

        `options`: arguments of transformers' `render_jinja_template`, and variables of the template. Raises
        `ConfigError` for reserved names or a failing template, and as `encode`.
        """
        for name in _RESERVED & {*(options or ())}:
            raise ConfigError(f"chat_template_kwargs: '{name}' is no variable of the chat template")
        if not self._template or not self.has_chat_template:
            return self.encode("\n\n".join(turn["content"] for turn in turns), max_length)
        variables = {"add_generation_prompt": True, **self._special_tokens, **(options or {})}
        text = _render(self._template, turns, variables, is_plain=self._is_plain and not options)
        return self.encode(text, max_length, special=False)

    def token_texts(self) -> dict[int, TokenText]:
        """The text of each token that both tokenizer and model have."""
        ids = self._backend.get_vocab().values()
        return {token_id: self.token_text(token_id) for token_id in ids if token_id < self.num_ids}

    def token_text(self, token_id: int) -> TokenText:
        """A token's text, or the name of a token without text."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return f"token_id:{token_id}"
        if (added := self._added.get(token_id)) is not None:
            return token if added.special else token.encode()
        if self._byte_of and all(character in self._byte_of for character in token):
            return bytes(self._byte_of[character] for character in token)
        if _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
        return token.replace(_METASPACE, " ").encode()

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of token ids without special tokens."""
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))


@dataclass(frozen=True, slots=True)
class Spelling:
    """How one token reads at its place in a text."""

    label: str
    """The token's text; a special or padded token's name; `bytes:` and the bytes of a part of a character."""
    utf8: bytes | None
    """The token's share of the text's bytes; None for a special or padded token."""
    num_characters: int
    """Characters that the token adds: 0 while a character is incomplete."""


class IncrementalDecoder:
    """Decodes a growing sequence piece by piece, and never gives half a character.

    Each token is decoded in a short window that begins with text, since some tokenizers decode a first token
    differently. Text that ends in a replacement character is held back, since the next token may complete the
    character. Text held back at the end of the prompt is given only if the answer completes it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """`prompt`: tokens before the first pushed one."""
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_read = 0  # tokens of the window whose text has been handed out
        self._num_given = 0  # characters of that text
        self._is_holding = False
        size = _CONTEXT
        while size < len(prompt) and not tokenizer.decode(prompt[-size:]).strip(_REPLACEMENT):
            size *= 2
        self._held_by_prompt = ""
        for token_id in prompt[-size:]:
            self.push(token_id)
        self._held_by_prompt = tokenizer.decode(self._window)[self._num_given :] if self._is_holding else ""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        piece = self._piece(token_id)
        self._window.append(token_id)
        self._is_holding = piece is None
        has_context = piece or len(self._window) >= _MAX_WINDOW
        if piece is None or not (has_context or self._num_read):
            return ""
        if has_context:
            del self._window[: self._num_read]
        else:  # a token without text is no context for the next one
            self._window.pop()
        self._num_read = len(self._window)
        self._num_given = len(self._tokenizer.decode(self._window))
        self._held_by_prompt = ""
        return piece

    def flush(self) -> str:
        """The text still held, such as an incomplete character."""
        text = self._tokenizer.decode(self._window)
        piece = text[self._num_given :].removeprefix(self._held_by_prompt)
        self._num_read, self._num_given = len(self._window), len(text)
        self._held_by_prompt = ""
        return piece

    def spell(self, token_id: int) -> Spelling:
        """How a token would read if it were pushed next."""
        own = self._tokenizer.token_text(token_id)
        if isinstance(own, str):
            return Spelling(own, None, 0)
        piece = self._piece(token_id)
        if piece is None:
            return Spelling("bytes:" + repr(own)[2:-1], own, 0)
        return Spelling(piece, own if self._is_holding else piece.encode(), len(piece))

    def _piece(self, token_id: int) -> str | None:
        """The text that the token would complete; None while a character is incomplete."""
        text = self._tokenizer.decode([*self._window, token_id])
        if text.endswith(_REPLACEMENT) and len(self._window) < _MAX_WINDOW:
            return None
        return text[self._num_given :].removeprefix(self._held_by_prompt)


def _render(template: str, turns: Conversation, variables: Mapping[str, Any], *, is_plain: bool) -> str:
    given = [{name: value for name, value in turn.items() if value is not None} for turn in turns]
    try:
        if is_plain:
            from jinja2.sandbox import ImmutableSandboxedEnvironment  # a draft never needs it

            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
            text = environment.from_string(template).render(messages=given, **variables)
        else:
            from transformers.utils.chat_template_utils import render_jinja_template

            (text,), _ = render_jinja_template([given], chat_template=template, **variables)
    except Exception as error:  # a template is a program that comes with a checkpoint
        reason = " ".join(str(error).splitlines()) or type(error).__name__
        raise ConfigError(f"prompt: the target's chat template refuses it: {reason}") from error
    return str(text)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a folder or hub name. Raises `ConfigError` if none fits the model."""
    model_config = load_config(path)
    config, folder = model_config.get_text_config(decoder=True), find_checkpoint(path, TOKENIZER)
    ends = [getattr(config, "eos_token_id", None)]
    if (folder / _GENERATION).exists():
        ends.append(read_json(path, folder, _GENERATION).get("eos_token_id"))
    is_plain = hasattr(model_config, PLAIN)
    with one_line_errors(path, "its tokenizer cannot be loaded"):
        if is_plain:
            backend, special_tokens, template = _read_plainly(folder)
        else:
            from amusd.checkpoints.transformers_models import load_stock_tokenizer

            backend, special_tokens, template = load_stock_tokenizer(folder)
        num_tokens, num_ids = backend.get_vocab_size(with_added_tokens=False), config.vocab_size
        if num_tokens > num_ids:
            raise ConfigError(f"model {path}: config.json: vocab_size={num_ids}; its tokenizer has {num_tokens}")
        end_ids = frozenset[int]().union(*map(_as_ids, ends))
        return Tokenizer(backend, special_tokens, template, end_ids, num_ids, is_plain=is_plain)


def _read_plainly(folder: Path) -> tuple[Backend, Mapping[str, str], str | None]:
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    special_tokens = {name: text for name, text in settings.items() if name.endswith("_token")}
    template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return Backend.from_file(str(folder / TOKENIZER)), special_tokens, template


def read_fingerprint(file: Path) -> str:
    """The fingerprint of a `tokenizer.json`, whatever other files say."""
    return Tokenizer(Backend.from_file(str(file))).fingerprint


def _byte_of_character() -> Mapping[str, int]:
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _as_ids(value: Any) -> frozenset[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(each) is not int for each in ids):
        raise ValueError(f"eos_token_id={value!r}; allowed: a number, a list of numbers, null")
    return frozenset(ids)
