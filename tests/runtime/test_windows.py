"""Models with windows of attention as target and as draft: the tokens of transformers' own forward."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from models import tiny
from models.blocks import random_ids, stock_logits
from runtime.pair import decoding, engine_of, on_pass
from table_model import TableTokenizer

from amusd.answer import Generation
from amusd.config import DecodingConfig, SamplingParams
from amusd.drafters.model import ModelDrafter
from amusd.engine import Engine
from amusd.models.attention import register_attention
from amusd.models.numerics import Numerics
from amusd.runner.load_options import LoadOptions
from amusd.runner.model_runner import ModelRunner

NAMES = ["Gemma3TextConfig", "Gemma4TextConfig", "GptOssConfig", "Olmo3Config", "MinistralConfig"]
SCHEDULES = {
    "plain": decoding("autoregressive"),
    "synchronous": decoding("synchronous", 3),
    "chain": decoding("asynchronous", 4, policy="chain", max_wait_passes=1000.0),
    "branching": decoding("asynchronous", 6, policy="branching"),
}
NOISE = {"Gemma3TextConfig": 0.1}
LENGTH = 640
CLEAR = 1e-3
"""Least difference of the two largest logits at which another token counts as wrong."""


@functools.cache
def models(name: str) -> tuple[Any, ModelRunner, ModelRunner]:
    """A model of transformers, ours, and ours with noise on its weights."""
    config = tiny.tiny_config(name, max_position_embeddings=LENGTH, sliding_window=64)
    stock = tiny.tiny_causal_lm(config)
    made = []
    for noise, width, fixed in ((0.0, 8, True), (NOISE.get(name, 0.03), 16, False)):
        own = tiny.tiny_causal_lm(config, register_attention())
        own.load_state_dict(stock.state_dict())
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in own.parameters():
                parameter.add_(noise * torch.randn_like(parameter))
        numerics = Numerics(width=width, fixed=fixed, num_tracks=3 if fixed else 1)
        made.append(tiny.wrap_model(own, LoadOptions(numerics=numerics, max_model_len=LENGTH)))
    return stock, made[0], made[1]


@pytest.fixture(params=NAMES)
def running(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Engine, Any]]:
    stock, target, draft = models(request.param)
    memory = iter(draft.new_caches(4, LENGTH, spare=64))
    drafters = {"noisy": lambda: ModelDrafter(draft, cache=next(memory))}
    with engine_of(target, TableTokenizer(tiny.VOCAB), drafters, max_num_seqs=4) as (engine, drafts):
        yield stock, engine, drafts


def check(stock: Any, prompt: Sequence[int], answer: Generation) -> None:
    """Each token is the likeliest one after the tokens before it."""
    ids = [*prompt, *answer.token_ids]
    for row, token in zip(stock_logits(stock, ids)[len(prompt) - 1 :], answer.token_ids, strict=False):
        assert row.max() - row[token] <= CLEAR


def ask(engine: Engine, prompts: Sequence[Sequence[int]], schedule: DecodingConfig, number: int) -> list[Generation]:
    params = SamplingParams(max_new_tokens=number, ignore_eos=True)
    return engine.generate([tuple(prompt) for prompt in prompts], params, decoding=schedule)


SHORT = (12, [], [[10, 58, 63, 130]])
MANY = [[length] for length in (5, 60, 64, 65, 125, 129, 250, 600)]


@pytest.mark.parametrize(
    ("number", "alone", "together"),
    [SHORT, pytest.param(40, MANY, [[5, 62, 66, 600], [120, 128, 130, 300]], marks=pytest.mark.long)],
)
def test_every_mode_gives_the_tokens_of_transformers(
    running: tuple[Any, Engine, Any], number: int, alone: list[list[int]], together: list[list[int]]
) -> None:
    stock, engine, drafts = running
    accepted = refused = 0
    for lengths in (*alone, *together):
        prompts = [random_ids(length, seed=length) for length in lengths]
        for name, schedule in SCHEDULES.items():
            for prompt, answer in zip(prompts, ask(engine, prompts, schedule, number), strict=True):
                assert len(answer.token_ids) == number
                check(stock, prompt, answer)
                if name == "synchronous":  # how many is no matter of timing there
                    accepted += answer.metrics.num_accepted
                    refused += answer.metrics.num_verified - answer.metrics.num_accepted
    assert min(accepted, refused) > 4
    on_pass(engine, lambda at: drafts.drop() if at == 5 else None)
    prompt = random_ids(70)
    [answer] = ask(engine, [prompt], SCHEDULES["chain"], 40)  # five passes give 25 tokens at most
    check(stock, prompt, answer)
    assert engine.draft.presence == "failed"
