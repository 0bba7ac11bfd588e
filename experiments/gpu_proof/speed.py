"""Times of passes and steps beside the time to read their bytes, the host's share, prefill, and messages."""

from __future__ import annotations

from dataclasses import replace

from amusd.checkpoints.synthetic import SHAPES
from amusd.commands.bench import read_bandwidth
from amusd.commands.other_worker import measure_one_way
from amusd.config import DecodingConfig, SamplingParams
from amusd.config.engine import ModelShape
from amusd.engine import Engine
from amusd.errors import ConfigError, PeerLostError
from amusd.models.kv_cache import KVCache
from amusd.models.passes import Rows
from amusd.runner.model_runner import ModelRunner, extend
from amusd.tracing.metrics import GenerationMetrics
from amusd.transport.factory import ON_ONE_MACHINE
from experiments.gpu_proof import adapter
from experiments.gpu_proof.environment import token_ids
from experiments.gpu_proof.plan import Scale
from experiments.gpu_proof.records import Job
from experiments.gpu_proof.timing import figures, timed

DRAFT_STEPS = 8
"""Steps in a row, as in a chain."""
LINKS = ("shared_memory", "gloo", "zeromq")
PREFILL_TOKENS = 4096


def passes(job: Job) -> None:
    """Time passes, steps and prefill, then the host's time between passes."""
    scale = job.scale
    gb_s = read_bandwidth(scale.device)
    job.write("bandwidth", gb_s=gb_s)
    config = adapter.engine_config(scale.device, scale.target, scale.draft, max_model_len=scale.max_model_len)
    _passes(job, adapter.prepared_target(config), gb_s)
    _steps(job, adapter.prepared_draft(config), gb_s)
    _host_time(job)


def _passes(job: Job, prepared: adapter.Prepared, gb_s: float) -> None:
    model, cache, scale = prepared.model, prepared.cache, job.scale
    _prefill(job, "target", model, cache)
    for context in scale.contexts:
        _fill(model, cache, context)
        for rows in (1, adapter.WIDTH):
            tokens = token_ids(model.num_ids, min(rows, model.numerics.max_rows(context)), rows)

            def run(tokens: list[int] = tokens, context: int = context) -> None:
                cache.truncate(context)
                model.run([Rows(tokens, cache)])[0].choose()

            floor_ms = (model.weight_bytes + cache_bytes(scale.target, context)) / gb_s / 1e6
            facts = {"shape": scale.target, "floor_ms": floor_ms, "context": context, "rows": len(tokens)}
            job.write("pass", **facts, **figures(timed(run, scale.rounds, scale.device)))


def _steps(job: Job, prepared: adapter.Prepared, gb_s: float) -> None:
    model, cache, scale = prepared.model, prepared.cache, job.scale
    _prefill(job, "draft", model, cache)
    for context in scale.contexts:
        _fill(model, cache, context)

        def run(context: int = context) -> None:
            cache.truncate(context)
            extend(model, [7], cache, DRAFT_STEPS)

        times = [time / DRAFT_STEPS for time in timed(run, scale.rounds, scale.device)]
        floor_ms = (model.weight_bytes + cache_bytes(scale.draft, context)) / gb_s / 1e6
        job.write("step", shape=scale.draft, context=context, floor_ms=floor_ms, **figures(times))


def cache_bytes(shape: ModelShape, context: int) -> int:
    """Bytes of the keys and values that one pass reads in bfloat16."""
    given = SHAPES[shape]
    head_dim = given.get("head_dim", given["hidden_size"] // given["num_attention_heads"])
    return int(2 * 2 * given["num_hidden_layers"] * given["num_key_value_heads"] * head_dim * context)


def _fill(model: ModelRunner, cache: KVCache, context: int) -> None:
    cache.truncate(0)
    model.prefill(token_ids(model.num_ids, context, context), cache)


def _prefill(job: Job, role: str, model: ModelRunner, cache: KVCache) -> None:
    num_tokens = min(PREFILL_TOKENS, model.max_length - 1)
    found = figures(timed(lambda: _fill(model, cache, num_tokens), 3, job.scale.device))
    job.write("prefill", role=role, num_tokens=num_tokens, tokens_per_second=1000 * num_tokens / found["ms"], **found)


def _host_time(job: Job) -> None:
    scale = job.scale
    config = replace(adapter.engine_config(scale.device, scale.target, scale.draft), drafters=())
    with Engine.start(config) as engine:
        for name, params in (
            ("greedy", SamplingParams()),
            ("temperature", SamplingParams(temperature=0.7)),
            ("filters", SamplingParams(temperature=0.7, top_p=0.95)),
        ):
            metrics = _plain(engine, params, scale)
            between = metrics.total_ns - metrics.prefill_ns - metrics.pass_ns - metrics.wait_ns
            job.write(
                "host",
                sampling=name,
                between_ms=between / metrics.num_passes / 1e6,
                pass_ms=metrics.pass_ns / metrics.num_passes / 1e6,
                num_passes=metrics.num_passes,
            )


def _plain(engine: Engine, params: SamplingParams, scale: Scale) -> GenerationMetrics:
    prompt = token_ids(512, 100, 1)
    decoding = DecodingConfig(mode="autoregressive")
    for num_tokens in (4, scale.num_tokens):  # the first is not measured
        params = replace(params, max_new_tokens=num_tokens, ignore_eos=True)
        answer = engine.generate(prompt, params, decoding=decoding)
    return answer.metrics


def links(job: Job) -> None:
    """Measure one-way times of messages between two processes."""
    for name in LINKS:
        try:
            p50_us, p99_us = measure_one_way(ON_ONE_MACHINE[name], num_messages=job.scale.num_messages)
        except (ConfigError, PeerLostError) as error:
            job.write("link", link=name, absent=str(error))
            continue
        job.write("link", link=name, p50_us=p50_us, p99_us=p99_us)
