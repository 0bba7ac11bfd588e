"""A drafter that is fed the layers beside its own is found out, whichever way its layout counts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import tiny
from models.test_block_models import load_dflash, load_medusa, medusa_weights, save_dflash, save_medusa
from models.test_eagle import LAYERS, OPTIONS, WIDTH, save_eagle3
from torch import Tensor

from amusd.models.cached_model import CachedModel
from amusd.models.draft_layouts import read_feature_spec
from amusd.models.eagle import load_eagle
from amusd.models.features import FeatureSpec
from amusd.models.huggingface import load_model
from amusd.models.layer_probe import (
    agreement_by_shift,
    describe_agreement,
    guess_with_block,
    guess_with_eagle,
    probe_layers,
    shifted_spec,
)

NUM_PROMPT, LENGTH = 5, 24


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny.save_checkpoint(folder, tiny.tiny_config(num_hidden_layers=LAYERS, tie_word_embeddings=False))
    return folder


@pytest.mark.parametrize("trained_with", [-1, 0, 1])
def test_the_layers_that_it_was_trained_with_agree_best(trained_with: int) -> None:
    """A drafter that reads the next but one token out of the one layer that shows it."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(1, 50, (60,), generator=generator).tolist()
    states = {layer: torch.rand(59, 1, generator=generator) for layer in (1, 2, 3)}
    shown = torch.tensor([*text[2:], 0], dtype=torch.float32)  # of position p, the token of p + 2
    states[2 + trained_with] = shown.unsqueeze(1)
    spec = FeatureSpec((2,), 1, torch.nn.Identity())

    def guess(token_ids: Sequence[int], features: Tensor) -> list[int]:
        assert len(features) == len(token_ids)
        return [round(feature) for feature in features[:-1].flatten().tolist()]

    agreement = agreement_by_shift(guess, spec, states, text, NUM_PROMPT)
    assert agreement[trained_with] == 1
    assert sorted(agreement.values())[-2] < 0.2
    is_right, line = describe_agreement(agreement)
    assert is_right == (trained_with == 0)
    expected = {
        -1: "but 100% with the layers one below",
        0: "100% of its first",
        1: "but 100% with the layers one above",
    }
    assert expected[trained_with] in line
    assert "\n" not in line


def test_layers_that_do_not_exist_are_not_tried() -> None:
    assert shifted_spec(FeatureSpec((0, 6), 4), 6, 8) == FeatureSpec((0, 1, 5, 6), 32)
    states = {layer: torch.zeros(9, 1) for layer in (5, 6)}

    def guess(token_ids: Sequence[int], _features: Tensor) -> list[int]:
        return [1] * (len(token_ids) - 1)

    agreement = agreement_by_shift(guess, FeatureSpec((6,), 1), states, [1] * 10, 3)
    assert agreement == {0: 1.0, -1: 1.0}


@pytest.mark.parametrize(
    ("agreement", "is_right"),
    [({0: 0.5, 1: 0.52}, True), ({0: 0.0, -1: 0.03}, True), ({0: 0.3, -1: 0.4}, False), ({0: 0.6, 1: 0.66}, True)],
)
def test_a_slight_difference_is_no_reason_to_warn(agreement: dict[int, float], is_right: bool) -> None:
    assert describe_agreement(agreement)[0] == is_right


def probed(target: Path, spec: FeatureSpec) -> tuple[CachedModel, FeatureSpec]:
    states = shifted_spec(spec, LAYERS, WIDTH)
    return load_model(target, replace(OPTIONS, features={"probe": states})), states


@pytest.mark.parametrize("kind", ["eagle", "medusa", "dflash"])
def test_every_kind_is_probed_on_an_answer_of_the_target(kind: str, target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    if kind == "eagle":
        guess = guess_with_eagle(load_eagle(save_eagle3(folder), target, OPTIONS))
    elif kind == "medusa":
        guess = guess_with_block(load_medusa(save_medusa(folder, medusa_weights()), target))
    else:
        guess = guess_with_block(load_dflash(save_dflash(folder), target))
    spec = read_feature_spec(folder, target, kind)
    model, states = probed(target, spec)
    agreement = probe_layers(model, "probe", states, spec, guess, [5, 6, 7, 8, 9], LENGTH)
    assert set(agreement) == ({0, -1} if kind == "medusa" else {0, -1, 1})
    assert all(0 <= share <= 1 for share in agreement.values())


def test_guesses_of_an_eagle_drafter_start_from_true_features_in_every_row(target: Path, tmp_path: Path) -> None:
    """Whatever the passes: rows of one pass read what another has overwritten otherwise."""
    folder = save_eagle3(tmp_path / "draft")
    text, features = [3 + index * 7 % 90 for index in range(40)], torch.randn(40, WIDTH)
    wide = load_eagle(folder, target, replace(OPTIONS, numerics=replace(OPTIONS.numerics, width=64)))
    narrow = load_eagle(folder, target, replace(OPTIONS, numerics=replace(OPTIONS.numerics, width=3)))
    expected = guess_with_eagle(wide)(text, features)
    assert len(expected) == 39
    assert len(set(expected)) > 2
    assert guess_with_eagle(narrow)(text, features) == expected


def test_a_drafter_of_a_fitting_target_is_right_where_that_is_sure(target: Path, tmp_path: Path) -> None:
    """A Medusa head that is the target's own head, fed the feature of the position that it guesses behind."""
    weights = {f"{head}.0.weight": torch.zeros(tiny.VOCAB, WIDTH) for head in range(2)}
    weights["0.0.weight"][7] = 0.001  # always token 7
    spec = FeatureSpec((LAYERS,), WIDTH)
    guess = guess_with_block(load_medusa(save_medusa(tmp_path / "draft", weights), target))
    states = {LAYERS: torch.ones(19, WIDTH)}
    assert agreement_by_shift(guess, spec, states, [7] * 20, 4) == {0: 1.0}
