"""How much of the next token's probability belongs to the n-gram cache (`SHARES` of `amusd/drafters/ngram.py`)?

    python experiments/embedded_draft/mixture.py --answers answers.json

On the answers that `evaluate.py` kept. For each number of agreeing tokens, the share that makes the target's tokens
likeliest, over every other prompt. On the other prompts, what mixing is worth: how often the target's token is among
the first 1, 2, 4 and 8 of the draft alone, of lookup where enough tokens agree and else the draft, and of the mixture.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluate import Answer, logits_of, whole_sequences

from amusd.config import DrafterConfig
from amusd.drafters.ngram import SHARES, NgramCache, shares_of
from amusd.drafters.tree import LOOKUP_WEIGHT
from amusd.models.cached_model import CachedModel
from amusd.models.embedded_draft import DRAFT_FILE, load_embedded_draft
from amusd.models.embedded_target import embedded_target_path

GRID = (0.02, 0.05, 0.08, 0.12, 0.16, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.92, 0.96)
DEPTHS = (1, 2, 4, 8)
_KEPT = 64
"""Likeliest tokens of the draft that are looked at."""
_LEAST = 1e-4
"""Probability that a token counts with at least: one surprise must not decide everything."""

Continuations = Sequence[tuple[int, int]]
Known = Callable[[Continuations], Sequence[tuple[int, float]]]
"""From what followed before to tokens with their shares of the probability."""


@dataclass(frozen=True, slots=True)
class Place:
    """One token of an answer."""

    prompt: int
    temperature: float
    token_id: int
    model: dict[int, float]
    """The draft's likeliest tokens with their probabilities."""
    continuations: Continuations


def main() -> None:
    """Read the command line and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True, help="file that evaluate.py kept")
    parser.add_argument("--draft-file", type=Path, default=DRAFT_FILE)
    arguments = parser.parse_args()
    draft = load_embedded_draft(
        embedded_target_path(),
        whole_sequences(),
        vocab_size=DrafterConfig.vocab_size,
        draft_file=arguments.draft_file,
    )
    answers = [Answer(**record) for record in json.loads(arguments.answers.read_text())]
    numbers = {prompt: number for number, prompt in enumerate(sorted({tuple(answer.prompt) for answer in answers}))}
    places = [place for answer in answers for place in places_of(answer, numbers[tuple(answer.prompt)], draft)]
    for temperature in sorted({place.temperature for place in places}):
        here = [place for place in places if place.temperature == temperature]
        print(f"\nTemperature {temperature:g}")
        fit([place for place in here if place.prompt % 2 == 0])
        compare([place for place in here if place.prompt % 2 == 1])


def places_of(answer: Answer, prompt: int, draft: CachedModel) -> Iterable[Place]:
    """The tokens of one answer."""
    assert draft.output_ids is not None  # it has a head of its own
    start = len(answer.prompt)
    probabilities = logits_of(draft, answer.prompt + answer.tokens)[start - 1 : -1].float().softmax(dim=-1)
    values, columns = probabilities.topk(_KEPT, dim=-1)
    ngrams = NgramCache()
    ngrams.open(answer.prompt)
    for token_id, row, best in zip(answer.tokens, values.tolist(), draft.output_ids[columns].tolist(), strict=True):
        model = dict(zip(best, row, strict=True))
        yield Place(prompt, answer.temperature, token_id, model, ngrams.continuations())
        ngrams.commit([token_id])


def fit(places: Sequence[Place]) -> None:
    """Print the best share for each number of agreeing tokens, the others being as they ship."""
    print(f"{'agreeing':>10}{'tokens':>9}{'right':>8}{'draft':>8}{'best share':>12}{'ships':>8}")
    for agreeing in range(len(SHARES)):
        here = [place for place in places if best_agreement(place) == agreeing]
        if not here:
            continue
        right = _mean(bool(place.continuations) and place.continuations[0][0] == place.token_id for place in here)
        draft = _mean(place.token_id == next(iter(place.model)) for place in here)
        best = min(GRID, key=lambda share: surprise(here, with_share(agreeing, share))) if agreeing else 0.0
        print(f"{agreeing:>10}{len(here):>9}{right:>8.3f}{draft:>8.3f}{best:>12.2f}{SHARES[agreeing]:>8.2f}")


def compare(places: Sequence[Place]) -> None:
    """Print what three ways to draft find."""
    ways: dict[str, Known] = {"draft": lambda _: (), "lookup or draft": looked_up, "mixture": shares_of}
    print(f"{'':>16}" + "".join(f"{f'first {depth}':>9}" for depth in DEPTHS) + f"{'nats':>8}{'tokens':>8}")
    for name, known in ways.items():
        ranks = [rank(place, known) for place in places]
        shares = "".join(f"{_mean(place < depth for place in ranks):>9.3f}" for depth in DEPTHS)
        print(f"{name:>16}{shares}{surprise(places, known):>8.3f}{len(places):>8}")


def best_agreement(place: Place) -> int:
    """How many tokens agree at most; as many as make a difference."""
    return min(place.continuations[0][1], len(SHARES) - 1) if place.continuations else 0


def with_share(agreeing: int, share: float) -> Known:
    """As it ships, but for one number of agreeing tokens."""
    shares = [share if number == agreeing else shipped for number, shipped in enumerate(SHARES)]
    return lambda continuations: shares_of(continuations, shares)


def looked_up(continuations: Continuations) -> Sequence[tuple[int, float]]:
    """The best continuation alone, where as many tokens agree as `drafter.min_lookup` asks for."""
    return [
        (token_id, LOOKUP_WEIGHT) for token_id, agreeing in continuations[:1] if agreeing >= DrafterConfig.min_lookup
    ]


def mixed(place: Place, known: Known) -> dict[int, float]:
    """Probabilities of the draft's likeliest tokens and of what is known."""
    shares = dict(known(place.continuations))
    rest = 1 - sum(shares.values())
    result = {token_id: rest * probability for token_id, probability in place.model.items()}
    for token_id, share in shares.items():
        result[token_id] = result.get(token_id, 0.0) + share
    return result


def rank(place: Place, known: Known) -> int:
    """How many tokens are likelier than the target's; very many where it is not among the likely ones."""
    probabilities = mixed(place, known)
    own = probabilities.get(place.token_id)
    return 10**6 if own is None else sum(probability > own for probability in probabilities.values())


def surprise(places: Sequence[Place], known: Known) -> float:
    """Mean of -log of the target's tokens' probabilities."""
    return _mean(-math.log(max(_LEAST, mixed(place, known).get(place.token_id, 0.0))) for place in places)


def _mean(values: Iterable[float]) -> float:
    collected = list(values)
    return sum(collected) / len(collected) if collected else 0.0


if __name__ == "__main__":
    main()
