"""A draft with another tokenizer than its target: its weights are given the target's token ids when they are loaded.

A token that both vocabularies have is read and proposed as the draft's own. A token of the target alone is never
proposed, and read as the mean of the draft's tokens that its text is made of. So the draft has one position for each
token of the target, and whatever decodes with it knows the target's ids alone: nothing is encoded again.

References: "Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies" (arXiv 2502.05202), the method of
the intersection.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from amusd.errors import ConfigError

TokenText: TypeAlias = bytes | str
"""The text of a token in UTF-8, which may end within a character; the name of a special token, as `str`."""

MIN_SHARE = 0.4
"""Least share of the tokens of `_ENGLISH` that a draft must be able to propose: it bounds the share of its tokens that
are accepted, and where fewer are, no mode gains much (`docs/your_own_pair.md`)."""
_ENGLISH = (
    "The lighthouse at the northern end of the island was built in 1847, after three ships had been lost in a "
    "single winter. Its keeper climbed the narrow staircase every evening, trimmed the lamp and wrote the weather "
    "into a book that is still kept in the village. Visitors are often surprised to learn how little of the "
    "original machinery has been replaced: apart from the electric motor, which was installed in the sixties, "
    "almost everything works as it did before. If you would like to see it yourself, take the morning ferry, bring "
    "a warm jacket, and follow the path along the cliffs for about forty minutes. Please don't feed the goats; they "
    "are friendly, but they remember people who carry sandwiches, and they will follow you home."
)


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """The tokens of a target and of a draft with another tokenizer, by their texts."""

    output_ids: Tensor
    """[shared] int64, ascending: the target's ids of the tokens that both have."""
    draft_ids: Tensor
    """[shared] int64: the draft's ids of the same tokens."""
    readings: Sequence[Sequence[int]]
    """The draft's ids that each id of the target is read as: none for an id without a text."""


def share_vocabulary(target: Mapping[int, TokenText], draft: Mapping[int, TokenText], num_ids: int) -> SharedVocabulary:
    """Compare the texts of the tokens of both. `num_ids`: rows of the target's embedding, padding included."""
    target_ids, draft_ids = (_ids_by_text(texts) for texts in (target, draft))
    shared = sorted((token_id, draft_ids[text]) for text, token_id in target_ids.items() if text in draft_ids)
    longest = max((len(text) for text in draft_ids), default=0)
    return SharedVocabulary(
        output_ids=torch.tensor([own for own, _ in shared], dtype=torch.int64),
        draft_ids=torch.tensor([other for _, other in shared], dtype=torch.int64),
        readings=[_split(target.get(token_id, b""), draft_ids, longest) for token_id in range(num_ids)],
    )


def _ids_by_text(texts: Mapping[int, TokenText]) -> dict[TokenText, int]:
    """The last id of each text: single bytes come before the characters that they spell, too."""
    return {texts[token_id]: token_id for token_id in sorted(texts)}


def _split(text: TokenText, ids: Mapping[TokenText, int], longest: int) -> list[int]:
    """The ids of the tokens that make up `text`, the longest first; bytes that no token begins with are left out."""
    if text in ids:
        return [ids[text]]
    rest = text.encode() if isinstance(text, str) else text
    found = []
    while rest:
        lengths = range(min(len(rest), longest), 0, -1)
        length = next((length for length in lengths if rest[:length] in ids), None)
        if length is not None:
            found.append(ids[rest[:length]])
        rest = rest[length or 1 :]
    return found


def check_share(output_ids: Tensor, num_ids: int, encode: Callable[[str], Sequence[int]]) -> None:
    """Raise `ConfigError` if a draft that proposes `output_ids` cannot gain; the others as of `describe_share`."""
    if _english_share(output_ids, encode) < MIN_SHARE:
        raise ConfigError(
            f"drafter: {describe_share(output_ids, num_ids, encode)}; a draft gains little below {MIN_SHARE:.0%}, so "
            "take one whose tokenizer is nearer to the target's, or drafter=ngram, which needs none"
        )


def describe_share(output_ids: Tensor, num_ids: int, encode: Callable[[str], Sequence[int]]) -> str:
    """How much of the target's vocabulary a draft can propose, in words.

    `num_ids`: of the target; `encode`: its tokenizer's.
    """
    return (
        f"its tokenizer differs from the target's: it can propose {len(output_ids):,} of {num_ids:,} token ids, "
        f"{_english_share(output_ids, encode):.0%} of the tokens of an English text"
    )


def _english_share(output_ids: Tensor, encode: Callable[[str], Sequence[int]]) -> float:
    return float(torch.isin(torch.tensor(encode(_ENGLISH)), output_ids.cpu()).float().mean())


def adopt_vocabulary(model: Any, shared: SharedVocabulary) -> None:
    """Change a loaded transformers model so that it reads the target's ids, and scores `shared.output_ids`."""
    reduce_head(model, shared.draft_ids)
    embedding = model.get_input_embeddings()
    starts = [0, *itertools.accumulate(len(reading) for reading in shared.readings)]
    pieces = torch.tensor([token_id for reading in shared.readings for token_id in reading], dtype=torch.int64)
    with torch.no_grad():
        rows = F.embedding_bag(pieces, embedding.weight, torch.tensor(starts[:-1]), mode="mean")  # zeros for no reading
    embedding.weight = torch.nn.Parameter(rows, requires_grad=False)
    embedding.num_embeddings = len(rows)


def reduce_head(model: Any, columns: Tensor) -> None:
    """Keep the rows `columns` of a transformers model's output head; an embedding that is tied to it stays whole."""
    head = model.get_output_embeddings()
    for name in ("weight", "bias", "weight_scale"):
        tensor = getattr(head, name, None)
        if tensor is not None:
            kept = tensor.detach()[columns]
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            setattr(head, name, torch.nn.Parameter(kept, requires_grad=False) if is_parameter else kept)
    head.out_features = len(columns)
