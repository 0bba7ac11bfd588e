"""Drafts with other token ids than their target: loading reorders a draft's weights to the target's ids.

A shared token is read and proposed as the draft's own. A token that only the target has is never proposed. It is read
as the longest draft token that its text begins with, so each token keeps one position.

References: "Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies" (arXiv 2502.05202), the method of
the intersection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from amusd.errors import ConfigError

EMBEDDING, HEAD, HEAD_BIAS = "model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"
Encode: TypeAlias = Callable[[str], Sequence[int]]
TokenText: TypeAlias = bytes | str
"""A token's UTF-8, perhaps part of a character; a special token's name, as `str`."""

MIN_SHARE = 0.7
"""Least share of `_ENGLISH`'s tokens that a draft must have in its head: with less no mode gains much."""
_ENGLISH = (
    "The lighthouse at the northern end of the island was built in 1847, after three ships had been lost in a "
    "single winter. Its keeper climbed the narrow staircase every evening, trimmed the lamp and wrote the weather "
    "into a book that is still kept in the village. If you would like to see it yourself, take the morning ferry, "
    "bring a warm jacket, and please don't feed the goats; they will follow you home."
)


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """The tokens of a target and of a draft with other ids."""

    output_ids: Tensor | None
    """[shared] int64, ascending: the target's ids of shared tokens; None: the ids are the same."""
    draft_ids: Tensor
    """[shared] int64: the draft's ids of shared tokens."""
    readings: Tensor
    """[target's ids] int64: the draft's id that is read for each; -1: none."""


def share_ids(num_ids: int, num_own: int) -> SharedVocabulary:
    """The ids of a target with `num_ids` rows and a draft with `num_own`; both have one tokenizer."""
    ids = torch.arange(num_ids)
    return SharedVocabulary(None, ids[:num_own], torch.where(ids < num_own, ids, -1))


def share_vocabulary(
    target: Mapping[int, TokenText], draft: Mapping[int, TokenText], num_ids: int, encode: Encode
) -> SharedVocabulary:
    """Compare both vocabularies by text. Raises `ConfigError` if they share too little for a draft to gain.

    `num_ids`: rows of the target's embedding, padding included. `encode`: of the target's tokenizer.
    """
    target_ids, draft_ids = ({text: token_id for token_id, text in sorted(each.items())} for each in (target, draft))
    shared = sorted((token_id, draft_ids[text]) for text, token_id in target_ids.items() if text in draft_ids)
    readings = [_reading(target.get(token_id, b""), draft_ids) for token_id in range(num_ids)]
    output_ids = torch.tensor([own for own, _ in shared], dtype=torch.int64)
    if _english_share(output_ids, encode) < MIN_SHARE:
        raise ConfigError(
            f"drafter: {describe_share(output_ids, num_ids, encode)}; below {MIN_SHARE:.0%} it would be right too "
            "rarely to pay, so take one whose tokenizer is nearer to the target's, or drafter=ngram, which needs none"
        )
    return SharedVocabulary(output_ids, torch.tensor([other for _, other in shared]), torch.tensor(readings))


def _reading(text: TokenText, ids: Mapping[TokenText, int]) -> int:
    data = text.encode() if isinstance(text, str) else text
    readings = (text, *(data[:length] for length in range(len(data), 0, -1)))
    return next((ids[reading] for reading in readings if reading in ids), -1)


def describe_share(output_ids: Tensor, num_ids: int, encode: Encode) -> str:
    """How much of the target's vocabulary a draft can propose, in words."""
    return (
        f"its tokenizer differs from the target's: it can propose {len(output_ids):,} of {num_ids:,} token ids, "
        f"{_english_share(output_ids, encode):.0%} of the tokens of an English text"
    )


def _english_share(output_ids: Tensor, encode: Encode) -> float:
    return float(torch.isin(torch.tensor(encode(_ENGLISH)), output_ids.cpu()).float().mean())


def adopt_vocabulary(weights: dict[str, Tensor], shared: SharedVocabulary) -> None:
    """Change a model's weights to read the target's ids and score `shared.output_ids`."""
    rows = weights[EMBEDDING][shared.readings]  # -1 takes the last row, which is wiped
    rows[shared.readings < 0] = 0
    reduce_head(weights, shared.draft_ids)
    weights[EMBEDDING] = rows


def reduce_head(weights: dict[str, Tensor], columns: Tensor) -> None:
    """Keep the rows `columns` of the output head; a tied embedding stays whole."""
    for name in (HEAD, HEAD_BIAS):
        if name in weights:
            weights[name] = weights[name][columns]
