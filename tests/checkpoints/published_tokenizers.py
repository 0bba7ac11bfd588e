"""Small tokenizers in two layouts in which many models are published: SentencePiece's, and Qwen's byte-level BPE."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

WORDS = ("the", "true", "false", "a", "sky", "blue", "why", "is", "rain", "falls")
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def sentencepiece_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """The kind of Llama 2, TinyLlama and Mistral: a token for each byte, `▁` for a space, the first one not shown."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *string.ascii_letters]
    pieces += [*string.digits, *".,!?:'"]
    merges = _add_words(pieces, "▁")
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([_special(name) for name in ("<unk>", "<s>", "</s>", "<tool>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names: dict[str, Any] = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=chat_template, **names)


def qwen_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """The kind of Qwen 2 and 3: tokens are byte sequences, a word has its space, special tokens come last."""
    pieces = [*bytes_to_unicode().values()]
    merges = _add_words(pieces, "Ġ")
    for left, right in (("Ġ", "â"), ("ð", "Ł")):  # a space and part of a character, half an emoji
        merges.append((left, right))
        pieces.append(left + right)
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([_special(name) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=chat_template, eos_token="<|im_end|>")


def _add_words(pieces: list[str], space: str) -> list[tuple[str, str]]:
    """Append each word letter by letter to `pieces`, then with a space before it; return the merges."""
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
            pieces.append(word[:end])
        merges.append((space, word))
        pieces.append(space + word)
    pieces[:] = list(dict.fromkeys(pieces))
    return list(dict.fromkeys(merges))


def _special(name: str) -> AddedToken:
    return AddedToken(name, special=True, normalized=False)


def ids_of(tokenizer: PreTrainedTokenizerFast, pieces: Sequence[str]) -> list[int]:
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[piece] for piece in pieces]
