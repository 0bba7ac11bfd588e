"""Models with recurrent layers: whatever is rolled back, a row has the logits of its text from the start."""

from __future__ import annotations

import random
import weakref
from pathlib import Path

import pytest
import torch
from fake_cuda.device import fake_cuda
from lines import logged
from models.published import damage_weights
from models.recurrent_models import RECURRENT, VOCAB, config_of, noisy_model, our_model, stock_logits, stock_model
from passes import prefilled

from amusd.checkpoints.building import load_model
from amusd.checkpoints.loading import capture_for
from amusd.checkpoints.transformers_models import try_layers
from amusd.errors import ConfigError
from amusd.models.attention import register_attention
from amusd.models.numerics import Numerics
from amusd.models.passes import Rows
from amusd.models.recurrent import StateHistory, StateShelf
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner

FEW = 25
NUM_SCHEDULES = [
    pytest.param(1, id="one"),
    pytest.param(25, id="25", marks=[pytest.mark.long, pytest.mark.timeout(3000)]),
]
WARNED = "so the modes may give different answers"
CLOSE = 2e-3
"""Tolerance of logits whose standard deviation is 1: nemotron_h bounds time steps in prompts alone."""


def text_of(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(3, VOCAB) for _ in range(length)]


def random_schedule(model: ModelRunner, name: str, seed: int, num_passes: int) -> None:
    """Passes of two sequences as a target or as a draft makes them, beside their texts' logits from the start."""
    chance = random.Random(f"{name} {seed}")
    texts = [text_of(chance, 10 * num_passes + 300) for _ in range(2)]
    expected = [stock_logits(name, text) for text in texts]
    caches = model.new_caches(2, len(texts[0]))
    for text, cache in zip(texts, caches, strict=True):
        model.prefill(text[: chance.randrange(1, 290)], cache)
    floors = [cache.length for cache in caches]
    for _ in range(num_passes):
        batch, right = [], []
        for text, cache, floor in zip(texts, caches, floors, strict=True):
            start, count = cache.length, chance.randint(1, 8)
            right.append(chance.randint(1, count))
            wrong = text_of(chance, count - right[-1])
            batch.append(Rows([*text[start : start + right[-1]], *wrong], cache, num_final=floor + 1 - start))
        for number, output in enumerate(model.run(batch)):
            start = caches[number].length - len(batch[number].token_ids)
            own = expected[number][start : start + right[number]]
            assert torch.allclose(output.logits[: right[number]], own, atol=CLOSE)
            floors[number] = max(floors[number], chance.randint(floors[number] + 1, start + right[number]))
            caches[number].truncate(chance.randint(floors[number], start + right[number]))
    for text, cache in zip(texts, caches, strict=True):  # the states themselves
        assert cache.history is not None
        place = cache.history.newest(cache.length)
        [fresh] = prefilled(model, text[:place], len(text)).history.states.values()
        for layer, state in cache.history.states[place].items():
            for kind in ("conv_states", "recurrent_states"):
                if (found := getattr(state, kind)[0]) is not None:
                    assert torch.allclose(found, getattr(fresh[layer], kind)[0], atol=CLOSE)


@pytest.mark.parametrize("num_schedules", NUM_SCHEDULES)
@pytest.mark.parametrize("name", RECURRENT)
def test_rows_have_the_logits_of_their_text_whatever_was_rolled_back(name: str, num_schedules: int) -> None:
    model = our_model(name)
    for seed in range(num_schedules):
        random_schedule(model, name, seed, FEW)


def saved(folder: Path, name: str) -> Path:
    stock_model(name).save_pretrained(folder)
    return folder


def load(folder: Path, *, fixed: bool = False, dtype: str = "float32") -> ModelRunner:
    numerics = Numerics.for_device("cpu", width=8, fixed=fixed)
    return load_model(folder, LoadOptions(numerics=numerics, max_model_len=64, dtype=dtype))


@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen3_5", "float32"), ("nemotron_h", "bfloat16"), ("kimi_linear", "bfloat16")]
)
def test_a_checkpoint_is_loaded_and_tried(name: str, dtype: str, tmp_path: Path) -> None:
    """Some of these models declare that their attention cannot be replaced, though it can."""
    with logged() as lines:
        model = load(saved(tmp_path, name), dtype=dtype)
    assert (lines, model.network.is_recurrent, model.numerics.num_tracks) == ([], True, 1)


def test_weights_that_are_no_numbers_are_not_taken_for_states_that_cannot_be_rolled_back(tmp_path: Path) -> None:
    damage_weights(saved(tmp_path, "qwen3_5"))
    assert load(tmp_path).network.is_recurrent


@pytest.mark.parametrize("name", ["bamba", "qwen3_5"])
def test_first_layers_are_a_model_of_their_own(name: str, tmp_path: Path) -> None:
    """Kinds of layers are a list in some configurations, and follow from other settings in others."""
    options = LoadOptions(numerics=Numerics.for_device("cpu", width=8, fixed=False), max_model_len=64, dtype="float32")
    model = load_model(saved(tmp_path, name), options, num_layers=2)
    assert len(model.network._model.base_model.layers) == 2


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_a_gpu_computes_the_same_without_graphs(name: str) -> None:
    text = text_of(random.Random(4), 60)
    with fake_cuda(values=True) as gpus:
        stock = noisy_model(name, attention=register_attention())
        for module in stock.modules():
            for parts in (module._parameters, module._buffers):
                parts |= {key: part.detach().to("cuda:0") for key, part in parts.items() if part is not None}
        model = our_model(name, model=stock, device="cuda:0", capture=capture_for("cuda:0", cuda_graphs=True))
        with gpus.recorded() as part:
            try_layers("a model", model)
        assert part.blocking_copies == []
        caches = model.new_caches(2, 100)
        for cache in caches:
            model.prepare(cache)
            model.prefill(text[:30], cache)
        for start, count in ((30, 3), (32, 1), (33, 5)):
            with gpus.recorded() as part:
                outputs = model.run([Rows(text[start : start + count], cache) for cache in caches])
            assert (len(part.waits), part.blocking_copies) == (1, []), "a blocking copy has no deadline"
            for output in outputs:
                assert output.logits.device.type == "cpu", "which samples"
                own = stock_logits(name, text)[start : start + count]
                assert torch.allclose(output.logits, own, atol=CLOSE)
            for cache in caches:
                cache.truncate(start + min(count, 2))


def test_layers_that_compute_several_tokens_wrongly_take_them_one_by_one() -> None:
    """The layers of transformers' jamba begin without their state where a pass has several tokens."""
    model = our_model("jamba")
    with logged() as lines:
        try_layers("j", model)
    assert lines == ["model j: its recurrent layers take one token at a time, as they compute several wrongly"]
    random_schedule(model, "jamba", 0, FEW)


def test_what_recurrent_layers_cannot_do_is_refused(tmp_path: Path) -> None:
    with logged() as lines:
        assert not load(saved(tmp_path, "lfm2"), fixed=True).numerics.fixed
    assert lines == [f"model {tmp_path}: a token's logits depend on how many tokens share its pass, {WARNED}"]
    model = our_model("lfm2")
    with pytest.raises(ValueError, match="chains alone"):
        model.run([Rows((3, 4, 5), prefilled(model, (3, 4), 32), parents=(0, 0))])
    model.network.recurrent.layers[0].forward = lambda hidden_states, **_: torch.rand_like(hidden_states)
    with pytest.raises(ConfigError, match="not supported: its recurrent state cannot be rolled back"):
        try_layers("m", model)


def test_attention_that_is_not_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = our_model("lfm2")
    for module in model.network._model.modules():
        if type(module).__name__ == "Lfm2Attention":
            monkeypatch.setattr(module, "config", config_of("lfm2", attn_implementation="eager"))
    with pytest.raises(ConfigError, match="not supported: its attention cannot be replaced"):
        try_layers("m", model)


def test_a_pass_that_was_not_finite_leaves_no_state() -> None:
    model, text = our_model("qwen3_5"), text_of(random.Random(1), 60)
    cache, expected = prefilled(model, text[:30], 60), stock_logits("qwen3_5", text)
    model.run([Rows(text[30:34], cache)])
    cache.truncate(31)
    norm = model.network._model.base_model.layers[0].input_layernorm
    norm.weight.mul_(torch.nan)
    [output] = model.run([Rows(text[31:36], cache)])
    assert output.logits.isnan().all()
    norm.weight.copy_(stock_model("qwen3_5").base_model.layers[0].input_layernorm.weight)
    cache.truncate(31)
    model.wipe(cache)
    [output] = model.run([Rows(text[31:32], cache)])
    assert torch.allclose(output.logits, expected[31:32], atol=CLOSE)


@pytest.mark.parametrize(("budget", "num_kept"), [(0, 0), (1, 1), (2.5, 2), (9, 4)])
def test_states_at_ends_of_prompts_are_kept_up_to_a_number_of_bytes(budget: float, num_kept: int) -> None:
    """States of the newest prompts are kept; a prompt of 150 tokens has two chunks on a CPU."""
    text = text_of(random.Random(2), 200)
    one = our_model("lfm2")
    [state] = prefilled(one, text[:5], 10).history.states.values()
    state_bytes = sum(layer.conv_states[0].nbytes for layer in state.values())
    model = our_model("lfm2", state_bytes=int(budget * state_bytes))
    caches = model.new_caches(2, 200)
    for cache in caches:
        model.prefill(text[:150], cache)
        for start in range(150, 160):
            model.run([Rows(text[start : start + 1], cache)])
    kept = [(number, place) for number, cache in enumerate(caches) for place in cache.history.states if place < 160]
    assert kept == [(0, 128), (0, 150), (1, 128), (1, 150)][4 - num_kept :]
    for number, place in reversed(kept):
        assert caches[number].history.newest(place + 3) == place
        caches[number].truncate(place + 3)
        [output] = model.run([Rows(text[place + 3 : place + 5], caches[number])])
        assert torch.allclose(output.logits, stock_logits("lfm2", text)[place + 3 : place + 5], atol=CLOSE)


def test_states_of_a_discarded_cache_take_no_room() -> None:
    """The newest two of those in use are kept: of a prompt of 150 tokens, at 128 and 150."""
    text = text_of(random.Random(2), 150)
    [state] = prefilled(our_model("lfm2"), text[:5], 10).history.states.values()
    model = our_model("lfm2", state_bytes=2 * sum(layer.conv_states[0].nbytes for layer in state.values()))
    old, new = model.new_cache(200), model.new_cache(200)
    model.prefill(text, old)
    history = weakref.ref(old.history)
    del old
    assert history() is None
    model.prefill(text, new)
    assert [*new.history.kept] == [128, 150]


@pytest.mark.parametrize(("acceptance", "most"), [(0.4, 4.7), (0.6, 3.45), (0.8, 2.2)])
def test_a_token_is_computed_once_more_at_most(acceptance: float, most: float) -> None:
    """Rows that a target computes per committed token with 6 candidates, those of candidates included."""
    chance, history, num_rows = random.Random(acceptance), StateHistory(StateShelf()), 0
    length = 0
    while length < 20_000:
        place = history.newest(length)
        again = length - place
        history.truncate(place)
        part = history.begin(0, [0] * (again + 7), again + 1)
        part.final[0] = None
        history.end(part)
        num_rows += again + 7
        length += 1 + next((number for number in range(6) if chance.random() >= acceptance), 6)
        history.truncate(length)
    assert num_rows / length < most
