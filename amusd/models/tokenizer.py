"""Text to token ids and back: the narrow interface, transformers' tokenizers behind it, and decoding token by token."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

from tokenizers import Tokenizer as Backend

from amusd.errors import ConfigError
from amusd.models.checkpoint import CONFIG, find_checkpoint, one_line_errors
from amusd.models.configuration import ModelConfig, load_config
from amusd.models.vocabulary import TokenText

_GENERATION = "generation_config.json"
_REPLACEMENT = "\ufffd"
_METASPACE = "\u2581"
"""How vocabularies of SentencePiece spell a space."""
_FIRST_BYTE = b"\n"
"""The start of SentencePiece's files, which are protobuf; others that end in `.model` are lines of text."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
"""How they spell a byte of a character that they lack."""
_CONTEXT = 4  # tokens of a prompt that are decoded at least
_MAX_WINDOW = 256  # tokens re-decoded at most; only text that is not UTF-8 comes near

_TOKENIZER, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_PLAIN_MODEL_TYPES = ("llama", "qwen3")
_PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""For which transformers reads `tokenizer.json` as it is, for models of those types."""
_PLAIN_SETTINGS = frozenset({
    "backend", "bos_token", "chat_template", "clean_up_tokenization_spaces", "eos_token", "is_local",
    "local_files_only", "model_max_length", "pad_token", "tokenizer_class", "unk_token",
})  # fmt: skip
"""Settings that change no id, if the special tokens are in `tokenizer.json`."""
_MORE_FILES = frozenset({"added_tokens.json", "special_tokens_map.json", "additional_chat_templates"})
_PATCHED_SIZE = 100_000
"""From which on transformers may mend a tokenizer."""

Conversation: TypeAlias = Sequence[Mapping[str, Any]]
"""Turns in order, each with `role` and `content`, and what else the chat template knows."""


def user_turn(text: str) -> Conversation:
    """A conversation of one message."""
    return ({"role": "user", "content": text},)


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back, of one model family."""

    eos_token_ids: frozenset[int]
    """The ids that end an answer."""
    fingerprint: str
    """Hex digest; equal for two tokenizers exactly if they give every text the same ids."""

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text, with the model's leading special tokens if it has any."""
        ...

    def encode_chat(self, turns: Conversation, **options: Any) -> list[int]:
        """Token ids of a conversation that waits for the answer to its last turn. `options`: for its template."""
        ...

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of token ids, special tokens left out."""
        ...

    def token_text(self, token_id: int) -> TokenText:
        """The text of a token wherever it stands, or the name of one that adds no text."""
        ...


@dataclass(frozen=True, slots=True)
class PlainTokenizer:
    """A `tokenizer.json` that needs nothing of transformers, whose names these are."""

    backend_tokenizer: Backend
    special_tokens_map: Mapping[str, str] = field(default_factory=dict)
    """Names and texts of special tokens, `eos_token` for instance."""
    chat_template: str | None = None

    @classmethod
    def read(cls, folder: Path, model_type: str) -> PlainTokenizer | None:
        """The tokenizer in a folder; None where transformers may make more of it than its `tokenizer.json` says."""
        names = {file.name for file in folder.iterdir()}
        if model_type not in _PLAIN_MODEL_TYPES or not names >= {_TOKENIZER, _SETTINGS} or names & _MORE_FILES:
            return None
        settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
        if settings.get("tokenizer_class") not in _PLAIN_CLASSES or settings.keys() - _PLAIN_SETTINGS:
            return None
        template = settings.get("chat_template")
        if "chat_template.jinja" in names:
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        special_tokens = {name: text for name, text in settings.items() if name.endswith("_token") and text is not None}
        if not all(isinstance(text, str) for text in (template or "", *special_tokens.values())):
            return None
        backend = Backend.from_file(str(folder / _TOKENIZER))
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        is_plain = added.issuperset(special_tokens.values()) and backend.get_vocab_size() < _PATCHED_SIZE
        return cls(backend, special_tokens, template) if is_plain else None


class HuggingFaceTokenizer:
    """The tokenizer of a checkpoint. Satisfies `Tokenizer`."""

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int], num_ids: int | None = None) -> None:
        """`tokenizer`: one of transformers around the library tokenizers, or a `PlainTokenizer`.

        `eos_token_ids`: those of the configurations; that of the tokenizer is added. `num_ids`: token ids of the model,
        padding included; None: those of the tokenizer.
        """
        self._backend: Backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special_tokens: Mapping[str, str] = tokenizer.special_tokens_map
        self._template = tokenizer.chat_template
        if isinstance(self._template, dict):  # by name
            self._template = self._template.get("default")
        self.num_ids = self._backend.get_vocab_size() if num_ids is None else num_ids
        eos = self._special_tokens.get("eos_token")
        self.eos_token_ids = eos_token_ids | _as_ids(None if eos is None else self._backend.token_to_id(eos))
        layout = json.loads(self._backend.to_str())
        self._added = self._backend.get_added_tokens_decoder()
        self._byte_of = _byte_of_character() if '"ByteLevel"' in json.dumps(layout.get("decoder")) else {}
        # All that maps text to ids; templates, padding and the layout of files do not change it.
        content = {"vocab": self._backend.get_vocab(), "added": sorted(token.content for token in self._added.values())}
        content["merges"] = layout["model"].get("merges", [])
        self.fingerprint = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations are formatted by a template; without one their contents are encoded as they are."""
        return bool(self._template)

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text, special tokens added as the checkpoint says."""
        return list(self._backend.encode(text).ids)

    def encode_chat(self, turns: Conversation, **options: Any) -> list[int]:
        """Token ids under the chat template, generation prompt included; without one, those of the contents.

        The contents are then separated by empty lines. `options` are the template's variables, and what transformers'
        `render_jinja_template` knows. Raises `ConfigError` when the template refuses the conversation (some want the
        roles to alternate) or fails.
        """
        if not self.has_chat_template:
            return self.encode("\n\n".join(turn["content"] for turn in turns))
        text = None if options else self._render_plainly(turns)
        if text is None:
            text = self._render(turns, options)
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _render_plainly(self, turns: Conversation) -> str | None:
        """The template with turns of a role and a text each; None where it wants more than jinja's own functions.

        What `_render` does, which takes a second to load.
        """
        if not all(turn.keys() == {"role", "content"} and set(map(type, turn.values())) == {str} for turn in turns):
            return None
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # which a draft does without

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals = {"range": environment.globals["range"]}
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special_tokens}
        try:
            text = environment.from_string(self._template).render(messages=[dict(turn) for turn in turns], **given)
            text.encode()
        except Exception:  # noqa: BLE001 - it may want transformers' functions, or `_render` says why not
            return None
        return text

    def _render(self, turns: Conversation, options: Mapping[str, Any]) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        given = [{name: value for name, value in turn.items() if value is not None} for turn in turns]
        variables = {"add_generation_prompt": True, **self._special_tokens, **options}
        try:
            (text,), _ = render_jinja_template([given], chat_template=self._template, **variables)
            text.encode()  # half of a surrogate pair has no bytes
        except Exception as error:  # a template is a program that comes with a checkpoint
            reason = " ".join(str(error).splitlines()) or type(error).__name__
            raise ConfigError(f"prompt: the target's chat template refuses it: {reason}") from error
        return str(text)

    def token_texts(self) -> dict[int, TokenText]:
        """`token_text` of each token that both tokenizer and model have."""
        return {
            token_id: self._text_of(token, token_id)
            for token, token_id in self._backend.get_vocab().items()
            if token_id < self.num_ids
        }

    def token_text(self, token_id: int) -> TokenText:
        """The text of a token, however the vocabulary spells it; a special or padded one has a name instead."""
        token = self._backend.id_to_token(token_id)
        return f"token_id:{token_id}" if token is None else self._text_of(token, token_id)

    def _text_of(self, token: str, token_id: int) -> TokenText:
        added = self._added.get(token_id)
        if added is not None:
            content: str = added.content
            return content if added.special else content.encode()
        if self._byte_of and all(character in self._byte_of for character in token):
            return bytes(self._byte_of[character] for character in token)
        if _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
        return token.replace(_METASPACE, " ").encode()

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text, special tokens left out, spaces as they are. Raises `ValueError` on an id out of range."""
        try:
            return str(self._backend.decode(list(token_ids), skip_special_tokens=True))
        except OverflowError as error:
            raise ValueError(f"a token id is out of range: {error}") from error


@dataclass(frozen=True, slots=True)
class Spelling:
    """How one token reads at its place in a text."""

    label: str
    """Its piece of the text. A special or padded token has its name, and part of a character `bytes:` and its bytes."""
    utf8: bytes | None
    """Its bytes, which are the text's when joined; None for a special or padded token."""
    num_characters: int
    """Characters that it adds to the text: 0 while a character is incomplete."""


class IncrementalDecoder:
    """Text of a growing token sequence, piece by piece, never half a character.

    Prompt and pieces together are the text that the tokenizer makes of all ids. A short window is decoded for each
    token. It begins with tokens that have text, because some tokenizers decode the first token of a text differently.
    Text is held back while it ends in a replacement character, because with byte tokens the next one may change all of
    it. Text that was handed out stands, although some tokenizers also replace the whole characters beside a broken one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """`prompt`: the tokens before the first one that is pushed; a character that they begin is completed here."""
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_read = 0  # tokens of the window whose text has been handed out
        self._num_given = 0  # characters of that text
        self._is_holding = False
        size = _CONTEXT
        while size < len(prompt) and not tokenizer.decode(prompt[-size:]).strip(_REPLACEMENT):
            size *= 2
        for token_id in prompt[-size:]:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """The new text that this token completes; empty while a character is incomplete."""
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
        return piece

    def flush(self) -> str:
        """The text still held: an incomplete character, as its replacement character."""
        text = self._tokenizer.decode(self._window)
        piece = text[self._num_given :]
        self._num_read, self._num_given = len(self._window), len(text)
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
        return text[self._num_given :]


def load_tokenizer(path: str | Path) -> HuggingFaceTokenizer:
    """The tokenizer of a checkpoint (a folder or hub name). Raises `ConfigError` if it has none that fits the model."""
    model_config = load_config(path)
    config, folder = model_config.get_text_config(decoder=True), find_checkpoint(path)
    if not any(_is_vocabulary(file.name) for file in folder.iterdir()):
        raise ConfigError(f"model {path}: no tokenizer in it (tokenizer.json); copy the files of its base model there")
    pieces = _sentencepiece_model(folder)
    with one_line_errors(path, "its tokenizer cannot be loaded"):
        tokenizer: Any = None
        if isinstance(model_config, ModelConfig):
            tokenizer = PlainTokenizer.read(folder, model_config.model_type)
        if tokenizer is None:
            from amusd.models.adapter import load_stock_tokenizer

            tokenizer = load_stock_tokenizer(folder)
        if pieces is not None:
            _match_sentencepiece(tokenizer, path, pieces)
    stated = None
    if (folder / _GENERATION).exists():
        with one_line_errors(path, _GENERATION):
            stated = json.loads((folder / _GENERATION).read_text(encoding="utf-8")).get("eos_token_id")
    num_tokens = tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=False)
    if num_tokens > config.vocab_size:
        raise ConfigError(
            f"model {path}: its tokenizer has {num_tokens} tokens, and {CONFIG} says vocab_size={config.vocab_size}"
        )
    ids = _as_ids(stated) | _as_ids(getattr(config, "eos_token_id", None))
    return HuggingFaceTokenizer(tokenizer, ids, config.vocab_size)


def read_fingerprint(file: Path) -> str:
    """The fingerprint of a `tokenizer.json`, whatever stands beside it."""
    return HuggingFaceTokenizer(PlainTokenizer(Backend.from_file(str(file))), frozenset()).fingerprint


def _sentencepiece_model(folder: Path) -> Path | None:
    """SentencePiece's file if transformers has to convert it, for which it needs `amusd[sentencepiece]`."""
    if any(_is_vocabulary(file.name) and file.suffix != ".model" for file in folder.iterdir()):
        return None
    return next((file for file in folder.glob("*.model") if file.read_bytes()[:1] == _FIRST_BYTE), None)


def _match_sentencepiece(tokenizer: Any, path: str | Path, file: Path) -> None:
    """Make transformers' conversion put a space before each text if SentencePiece does; some of its classes do not.

    Raises `ConfigError` if they differ in more than that.
    """
    from sentencepiece import SentencePieceProcessor
    from tokenizers import decoders, normalizers

    expected = SentencePieceProcessor(model_file=str(file)).encode("a b", out_type=str)
    if expected[0].startswith(_METASPACE) and not tokenizer.tokenize("a b")[0].startswith(_METASPACE):
        backend = tokenizer.backend_tokenizer
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_METASPACE), backend.normalizer])
        backend.decoder = decoders.Sequence([backend.decoder, decoders.Strip(" ", 1, 0)])
    if tokenizer.tokenize("a b") != expected:
        raise ConfigError(
            f"model {path}: transformers reads {file.name} as another kind of tokenizer; copy its base model's "
            "tokenizer.json there"
        )


def _byte_of_character() -> Mapping[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: itself if it can be printed."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _is_vocabulary(name: str) -> bool:
    return (
        name in ("tokenizer.json", "tekken.json") or name.startswith("vocab.") or name.endswith((".model", ".tiktoken"))
    )


def _as_ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset((value,)) if isinstance(value, int) else frozenset(value)
