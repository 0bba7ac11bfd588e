"""Whether a drafter reads the layers of its target that it was trained with.

Layouts count layers in four ways (`draft_layouts.py`), and published configurations mix them: a drafter that is fed the
states of the layers beside its own works, but guesses worse. So its first guesses behind a text of the target are
compared with the target's own choices, with its layers and with those one below and one above.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from amusd.models.block_models import BlockModel
from amusd.models.cached_model import CachedModel
from amusd.models.features import FeatureSpec
from amusd.models.language_model import FeatureRows
from amusd.models.passes import Part, PathRows

SHIFTS = (0, -1, 1)
"""How many layers further up the states are taken."""
_CLEARLY = 1.25
"""Another shift is reported if it guesses right this many times as often."""
_LEAST = 0.05
"""And if it is right more often by this share of all guesses."""
NUM_TOKENS = 96
"""Length of the answer."""

Guess: TypeAlias = Callable[[Sequence[int], Tensor], list[int]]
"""A text and the features [positions, width] of all of it -> the guess behind each position from 1 on, which may see
the features of earlier positions alone."""


def shifted_spec(spec: FeatureSpec, num_layers: int, hidden_size: int) -> FeatureSpec:
    """All states that the drafter of `spec` may be fed, as they are."""
    wanted = {layer + shift for layer in spec.layers for shift in SHIFTS}
    layers = tuple(sorted(layer for layer in wanted if 0 <= layer <= num_layers))
    return FeatureSpec(layers, len(layers) * hidden_size)


def agreement_by_shift(
    guess: Guess, spec: FeatureSpec, states: Mapping[int, Tensor], token_ids: Sequence[int], num_prompt: int
) -> dict[int, float]:
    """The share of the answer's tokens that the drafter guesses right, for each shift of its layers that is possible.

    `states`: [positions, hidden] float32 of all but the last token, by layer; `num_prompt`: tokens before the answer.
    """
    agreement = {}
    reduce = None if spec.reduce is None else spec.reduce.float()
    for shift in SHIFTS:
        layers = [layer + shift for layer in spec.layers]
        if not all(layer in states for layer in layers):
            continue
        features = torch.cat([states[layer] for layer in layers], dim=-1)
        with torch.inference_mode():
            guessed = guess(token_ids[:-1], features if reduce is None else reduce(features))
        pairs = list(zip(guessed, token_ids[2:], strict=True))[num_prompt - 2 :]
        agreement[shift] = sum(one == other for one, other in pairs) / len(pairs)
    return agreement


def describe_agreement(agreement: Mapping[int, float]) -> tuple[bool, str]:
    """Whether the layers are those that suit the drafter best, and a line about that."""
    own = agreement[0]
    best = max(agreement, key=lambda shift: (agreement[shift], shift == 0))
    text = f"{own:.0%} of its first guesses are the target's choice"
    if agreement[best] - own <= _LEAST or agreement[best] < _CLEARLY * own:
        return True, text
    where = "above" if best > 0 else "below"
    return False, (
        f"{text}, but {agreement[best]:.0%} with the layers one {where}: its config.json counts them in another way; "
        "write eagle_aux_hidden_state_layer_ids (or target_layer_ids, less 1) as indices of transformers' hidden_states"
    )


def probe_layers(
    target: CachedModel,
    name: str,
    states: FeatureSpec,
    spec: FeatureSpec,
    guess: Guess,
    prompt: Sequence[int],
    length: int = NUM_TOKENS,
) -> dict[int, float]:
    """`agreement_by_shift` on an answer of `length` tokens that the target gives to `prompt`, of two tokens at least.

    `name`, `states`: under which `target` writes features, and which; see `shifted_spec`.
    """
    cache = target.new_cache(len(prompt) + length)
    target.prefill(prompt[:-1], cache)
    token_ids = [*prompt, *target.extend(prompt[-1:], cache, length)]
    (rows,) = target.read_features([FeatureRows(cache, 0, len(token_ids) - 1, target.feature_columns[name])])
    parts = rows.float().chunk(len(states.layers), dim=-1)
    return agreement_by_shift(guess, spec, dict(zip(states.layers, parts, strict=True)), token_ids, len(prompt))


def guess_with_eagle(model: CachedModel) -> Guess:
    """The guesses of an EAGLE drafter whose rows all start from true features."""

    def guess(token_ids: Sequence[int], features: Tensor) -> list[int]:
        cache, end = model.new_cache(len(token_ids) + 1), len(token_ids)
        columns: list[int] = []
        for start in range(1, end, model.width):
            rows = range(start, min(start + model.width, end))
            model.write_features([row - 1 for row in rows], features[rows.start - 1 : rows.stop - 1], cache)
            prefix = np.arange(1, start)  # the row of a token has the slot of its position; the first has none
            paths = [[*range(start, row + 1)] for row in rows]
            tokens = token_ids[rows.start : rows.stop]
            columns += model.forward_trees([Part(cache, tokens, PathRows(prefix, paths))])[0].choose()
        return columns if model.output_ids is None else model.output_ids.cpu()[columns].tolist()

    return guess


def guess_with_block(model: BlockModel) -> Guess:
    """The first guesses of a Medusa or DFlash drafter."""

    def guess(token_ids: Sequence[int], features: Tensor) -> list[int]:
        state = model.new_state()
        columns = []
        for position in range(1, len(token_ids)):
            state.take(position - 1, features[position - 1 : position])
            columns.append(int(state.score(position, token_ids[position])[0].argmax()))
        return columns if model.output_ids is None else model.output_ids.cpu()[columns].tolist()

    return guess
