"""Pairs with recurrent layers, over real workers: the tokens that transformers' plain decoding chooses."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest
from integrations import test_vllm
from lines import logged
from models import test_decoder
from models.recurrent_models import RECURRENT, VOCAB, check_greedy, noisy_model, our_model
from models.tiny import byte_tokenizer
from passes import prefilled
from runtime.pair import await_restarts, decoding, engine_of, on_pass
from table_model import TableTokenizer

from amusd.checkpoints.loading import DRAFT_ROWS
from amusd.config import DecodingConfig, EngineConfig, SamplingParams
from amusd.drafters.base import Drafter, DrafterFactory
from amusd.drafters.factory import cascade_factory
from amusd.drafters.model import ModelDrafter
from amusd.drafters.ngram import NgramDrafter
from amusd.engine import Engine
from amusd.models.attention import register_attention
from amusd.models.numerics import Numerics
from amusd.protocol.draft_tree import MAX_NODES
from amusd.runner.model_runner import ModelRunner, extend
from amusd.runtime.draft_client import DraftClient
from amusd.runtime.target_worker import TargetWorker
from amusd.settings import from_mapping
from amusd.tracing.recorder import Recorder

NOISE = 0.1
PLAIN, SYNCHRONOUS = decoding("autoregressive"), decoding("synchronous", 5)
SCHEDULES = (
    PLAIN,
    SYNCHRONOUS,
    decoding("synchronous", 5, tree=True),
    decoding("asynchronous", 6, policy="chain"),
    decoding("asynchronous", 6, policy="branching"),
    decoding("asynchronous", 6),
)
LENGTHS = (5, 40, 129, 200)
PARAMS = SamplingParams(max_new_tokens=16)


def prompts_of(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    chance = random.Random(3)
    return [tuple(chance.randrange(3, VOCAB) for _ in range(length)) for length in lengths]


def drafters_of(model: ModelRunner, number: int) -> list[Drafter]:
    caches = model.new_caches(number, model.max_length, spare=MAX_NODES)
    return [ModelDrafter(model, cache=cache) for cache in caches]


def check_pair(
    name: str,
    target: ModelRunner,
    draft: ModelRunner,
    schedules: Sequence[DecodingConfig],
    prompts: Sequence[tuple[int, ...]],
    *,
    num_tokens: int = 16,
    max_num_seqs: int = 4,
    dies_at: int | None = None,
) -> None:
    """Answers of each schedule are those of transformers; candidates were accepted, and rejected."""
    made = drafters_of(draft, 2 * max_num_seqs)
    params = SamplingParams(max_new_tokens=num_tokens)
    factories = {"draft": made.pop}
    restarts = dies_at is not None
    with engine_of(target, TableTokenizer(VOCAB), factories, max_num_seqs=max_num_seqs, restarts=restarts) as (
        engine,
        drafts,
    ):
        if dies_at is not None:
            on_pass(engine, lambda number: drafts.drop() if number == dies_at else None)
        for schedule in schedules:
            for answer, prompt in zip(engine.generate(prompts, params, decoding=schedule), prompts, strict=True):
                check_greedy(name, prompt, answer.token_ids)
        await_restarts(engine, int(restarts))
        counts = engine.worker.counts
    if schedules[-1] is not PLAIN:
        assert 0 < counts.num_accepted < counts.num_verified


@pytest.mark.parametrize(("name", "schedule"), [*zip(("qwen3_5", "lfm2", "nemotron_h"), SCHEDULES[3:], strict=True)])
def test_a_pair_with_recurrent_layers_answers_as_transformers_does(name: str, schedule: DecodingConfig) -> None:
    check_pair(name, our_model(name), our_model(name, NOISE), (schedule, SYNCHRONOUS), prompts_of(LENGTHS))


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("max_num_seqs", [1, 4])
@pytest.mark.parametrize("name", RECURRENT)
def test_all_schedules_of_pairs_with_recurrent_layers(name: str, max_num_seqs: int) -> None:
    """Prompts cross borders of chunks; then a draft is lost amid an answer, once in each run."""
    prompts = prompts_of((5, 64, 128, 129, 300, 600))
    target, draft = our_model(name), our_model(name, NOISE)
    check_pair(name, target, draft, SCHEDULES, prompts, num_tokens=40, max_num_seqs=max_num_seqs)
    for schedule in SCHEDULES[3:]:
        both = schedule, SYNCHRONOUS
        check_pair(name, target, draft, both, prompts[::2], num_tokens=40, max_num_seqs=max_num_seqs, dies_at=9)


def extend_of(model: ModelRunner, token_ids: Sequence[int]) -> list[int]:
    cache = prefilled(model, token_ids[:-1], test_vllm.CAPACITY + 1)
    return extend(model, token_ids[-1:], cache, test_vllm.CAPACITY - len(token_ids))


def lean() -> ModelRunner:
    numerics = Numerics.for_device("cpu", width=DRAFT_ROWS, fixed=False)
    return test_decoder.lean_model(test_decoder.stock_model(test_decoder.Case("LlamaConfig")), numerics)


def plain_answers(target: ModelRunner, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    client = DraftClient(Recorder("target"))
    with Engine(TargetWorker(target, Recorder("target"), client), TableTokenizer(VOCAB)) as engine:
        return [answer.token_ids for answer in engine.generate(prompts, PARAMS, decoding=PLAIN)]


PAIRS: Mapping[str, tuple[Callable[[], ModelRunner], Callable[[], DrafterFactory]]] = {
    "recurrent target, trees of a lean draft": (lambda: our_model("lfm2"), lambda: partial(drafters_of, lean())),
    "recurrent target, prompt lookup": (
        lambda: our_model("lfm2"),
        lambda: lambda n: [NgramDrafter(1) for _ in range(n)],
    ),
    "recurrent target and cascade": (
        lambda: our_model("lfm2"),
        lambda: cascade_factory(our_model("lfm2", NOISE), partial(drafters_of, our_model("lfm2", 2 * NOISE))),
    ),
    "lean target, recurrent draft": (lean, lambda: partial(drafters_of, our_model("lfm2"))),
}


@pytest.mark.parametrize("kinds", PAIRS)
@pytest.mark.parametrize("schedule", [SYNCHRONOUS, SCHEDULES[4]], ids=["synchronous", "branching"])
def test_any_draft_serves_a_recurrent_target_and_a_recurrent_one_any_target(
    kinds: str, schedule: DecodingConfig
) -> None:
    make_target, make_drafts = PAIRS[kinds]
    name = "cascade" if "cascade" in kinds else "draft"
    if name == "cascade" and schedule is SCHEDULES[4]:  # which drafts no trees
        schedule = SCHEDULES[3]
    target, prompts, made = make_target(), prompts_of((5, 40, 130)), [*make_drafts()(4)]
    expected = plain_answers(target, prompts)
    with engine_of(target, TableTokenizer(VOCAB), {name: made.pop}, max_num_seqs=2) as (engine, _):
        answers = engine.generate(prompts, PARAMS, decoding=schedule)
        assert [answer.token_ids for answer in answers] == expected
        assert engine.worker.counts.num_verified > 0 or schedule is not SYNCHRONOUS  # else a slow draft comes too late


def test_auto_plans_no_trees_for_a_draft_that_drafts_none() -> None:
    """Its candidates have no weights, and there is no tree that waits for verdicts."""
    draft = our_model("lfm2")
    with engine_of(lean(), TableTokenizer(VOCAB), {"draft": drafters_of(draft, 1).pop}) as (engine, _):
        answer = engine.stream((3, 4), PARAMS)
        assert (answer.request.policy.name, answer.request.policy.fan_out) == ("auto", 1)
        assert len(answer.result().token_ids) == PARAMS.max_new_tokens


def test_a_chat_goes_on_from_the_state_after_its_last_prompt() -> None:
    """Target and draft both do; a prompt with the same beginning goes on from the end of a chunk."""
    options = {"state_bytes": 1_000_000}
    target, draft = our_model("bamba", **options), our_model("bamba", NOISE, **options)
    [prompt] = prompts_of((200,))
    with engine_of(target, TableTokenizer(VOCAB), {"draft": drafters_of(draft, 1).pop}) as (engine, _):
        first = engine.generate(prompt, PARAMS, decoding=SCHEDULES[3])
        prompts = (*prompt, 5, 6), (*prompt, *first.token_ids[:-2], 5, 6), (*prompt[:150], 7, 8)
        again = [engine.generate(each, PARAMS, decoding=SCHEDULES[3]) for each in prompts]
    for each, answer in zip((prompt, *prompts), (first, *again), strict=True):
        check_greedy("bamba", each, answer.token_ids)
    assert [answer.metrics.num_cached_tokens for answer in (first, again[0], again[2])] == [0, 199, 128]
    assert again[1].metrics.num_cached_tokens >= 199


@pytest.mark.parametrize("is_chain", [True, False])
def test_a_recurrent_draft_serves_vllm(is_chain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It drafts for vLLM's rows as long as they agree, and follows where they do not."""
    stock = noisy_model("lfm2", attention=register_attention(), vocab_size=test_vllm.VOCAB_SIZE)
    model = our_model("lfm2", model=stock)
    made = drafters_of(model, 2 * test_vllm.MAX_NUM_SEQS)
    monkeypatch.setattr(test_vllm, "TableTreeDrafter", lambda _: made.pop())
    for number, prompt in enumerate(test_vllm.PROMPTS[:2]):
        text = [*prompt, *extend_of(model, prompt)]
        text[20 + number] = (text[20 + number] + 1) % test_vllm.VOCAB_SIZE  # a token that it cannot foresee
        text[21 + number :] = extend_of(model, text[: 21 + number])
        monkeypatch.setitem(test_vllm.TEXTS, prompt, text[: test_vllm.CAPACITY])
    drafts, num_right = test_vllm.Drafts(), 0
    drafts.chains = ("hf",) if is_chain else ()
    runner = test_vllm.Runner(*test_vllm.PROMPTS[:2], drafts=drafts, rows_per_step=5)
    while runner.rows:
        runner.drafts.let(9)
        num_right += sum(runner.run())
        shapes = {(row.wish.fan_out, row.wish.rows_per_step) for row in runner.batch._rows if row is not None}
        assert shapes <= {(1, 1) if is_chain else (5, 5)}
    assert num_right > 40


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a killed draft is forked anew on Linux alone")
def test_a_draft_that_is_killed_costs_no_token(tmp_path: Path) -> None:
    """Checkpoints, processes and the default schedule."""
    tokenizer = byte_tokenizer()
    for folder, noise in (("target", 0.0), ("draft", NOISE)):
        noisy_model("lfm2", noise, vocab_size=len(tokenizer)).save_pretrained(tmp_path / folder)
        tokenizer.save_pretrained(tmp_path / folder)
    models = [{"kind": "hf", "model": str(tmp_path / name), "dtype": "float32"} for name in ("target", "draft")]
    config = from_mapping(EngineConfig, {"target": models[0], "drafters": models[1:], "max_model_len": 400})
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    prompts = [tuple(place % 90 + 3 for place in range(length)) for length in (5, 130, 200)]
    with logged() as lines, Engine.start(config) as engine:
        plain = [answer.token_ids for answer in engine.generate(prompts, params, decoding=PLAIN)]
        answers = [engine.submit(prompt, params) for prompt in prompts]
        for number, _ in enumerate(answers[0]):
            if number == 30:
                psutil.Process(engine.draft.pid).kill()
        assert [answer.result().token_ids for answer in answers] == plain
        assert engine.draft.chains == ("hf",)
        assert (len(engine.draft.losses), engine.worker.counts.num_accepted > 0) == (1, True)
    assert [line for line in lines if line.startswith("verify_width=bucketed: the target has recurrent states")]
