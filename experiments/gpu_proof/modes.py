"""Whether all modes give the same tokens, also with a lost draft, and the law of the ratio test; with a small pair."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from amusd.config import DecodingConfig, DrafterConfig, EngineConfig, HardwareConfig, SamplingParams, TargetConfig
from amusd.engine import Engine
from experiments.gpu_proof.checkpoint import VOCAB_SIZE, save_small_pair
from experiments.gpu_proof.environment import token_ids
from experiments.gpu_proof.plan import GPU
from experiments.gpu_proof.records import Job

SAMPLINGS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.8, seed=3),
    "filters": SamplingParams(temperature=0.8, top_p=0.95, top_k=40, seed=4),
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.3, seed=5),
}
DECODINGS = {
    "synchronous": DecodingConfig(mode="synchronous", num_speculative_tokens=4),
    "chain": DecodingConfig(policy="chain", max_wait_passes=10.0),  # passes are short: it waits for candidates
    "branching": DecodingConfig(policy="branching", max_wait_passes=10.0),
    "auto": DecodingConfig(policy="auto"),
}
PLAIN = DecodingConfig(mode="autoregressive")
RETURN_SECONDS = 90.0
"""Longest wait for the next draft, which on a GPU loads its model first."""
_NUM_BINS = 8


def modes(job: Job) -> None:
    """Check all samplings in all modes, the law of the ratio test, then a draft that is killed in mid-answer."""
    on_gpu = job.scale.device == GPU
    lengths, num_tokens = ((20, 300, 1500), 96) if on_gpu else ((20, 150), 24)
    prompts = [token_ids(VOCAB_SIZE, length, length) for length in lengths]
    with _engine(job) as engine:
        for name, sampling in SAMPLINGS.items():
            _compare(job, engine, name, sampling, prompts, num_tokens)
        _law(job, engine, prompts[0])
        _kill(job, engine, prompts[-1], num_tokens)


def batch(job: Job) -> None:
    """Check that four sequences at once get the tokens of each alone, in every mode."""
    lengths, num_tokens = ((20, 300, 1500, 700), 96) if job.scale.device == GPU else ((20, 150, 7, 60), 24)
    prompts = [token_ids(VOCAB_SIZE, length, length) for length in lengths]
    with _engine(job, max_num_seqs=len(prompts)) as engine:
        for name, sampling in SAMPLINGS.items():
            params = replace(sampling, max_new_tokens=num_tokens, ignore_eos=True)
            for mode, decoding in {"autoregressive": PLAIN, **DECODINGS}.items():
                alone = [engine.generate(prompt, params, decoding=decoding).token_ids for prompt in prompts]
                started = time.perf_counter()
                together = engine.generate(prompts, params, decoding=decoding)
                seconds = time.perf_counter() - started
                job.write(
                    "batch",
                    sampling=name,
                    mode=mode,
                    num_prompts=len(prompts),
                    num_identical=sum(one.token_ids == own for one, own in zip(together, alone, strict=True)),
                    tokens_per_second=num_tokens * len(prompts) / seconds,
                )


@contextmanager
def _engine(job: Job, max_num_seqs: int = 1) -> Iterator[Engine]:
    target, draft = save_small_pair(job.results / job.part)
    config = EngineConfig(
        target=TargetConfig(kind="hf", model=str(target)),
        drafters=(DrafterConfig(kind="hf", model=str(draft)),),
        hardware=HardwareConfig(devices=(job.scale.device,) * 2),
        max_model_len=2048,
        max_num_seqs=max_num_seqs,
        prefix_caching=False,  # a prompt is answered several times
    )
    with Engine.start(config) as engine:
        yield engine


def _answer(
    engine: Engine, prompt: Sequence[int], sampling: SamplingParams, num_tokens: int, decoding: DecodingConfig
) -> tuple[tuple[int, ...], float]:
    params = replace(sampling, max_new_tokens=num_tokens, ignore_eos=True)
    answer = engine.generate(prompt, params, decoding=decoding)
    return answer.token_ids, float(answer.metrics.as_dict()["acceptance_rate"] or 0.0)


def _compare(
    job: Job, engine: Engine, name: str, sampling: SamplingParams, prompts: list[list[int]], num_tokens: int
) -> None:
    plain = [_answer(engine, prompt, sampling, num_tokens, PLAIN)[0] for prompt in prompts]
    for mode, decoding in DECODINGS.items():
        answers = [_answer(engine, prompt, sampling, num_tokens, decoding) for prompt in prompts]
        job.write(
            "modes",
            sampling=name,
            mode=mode,
            num_prompts=len(prompts),
            num_identical=sum(tokens == other for (tokens, _), other in zip(answers, plain, strict=True)),
            acceptance=sum(rate for _, rate in answers) / len(answers),
        )


def _law(job: Job, engine: Engine, prompt: list[int]) -> None:
    """Compare the second token of many answers under the ratio test with plain decoding, as two samples."""
    counts: dict[str, Counter[int]] = {}
    for rule, decoding in (("matching", PLAIN), ("rejection", DECODINGS["synchronous"])):
        params = SamplingParams(temperature=0.5, acceptance=rule)  # type: ignore[arg-type]  # both are rules
        drawn = (
            _answer(engine, prompt, replace(params, seed=seed), 2, decoding)[0][1]
            for seed in range(job.scale.num_draws)
        )
        counts[rule] = Counter(drawn)
    common = [token for token, _ in (counts["matching"] + counts["rejection"]).most_common(_NUM_BINS)]
    rows = torch.tensor(
        [[*(count[token] for token in common), job.scale.num_draws - sum(count[token] for token in common)]
         for count in counts.values()],
        dtype=torch.float64,
    )  # fmt: skip
    expected = rows.sum(0) / 2
    seen = expected > 0
    statistic = float(((rows - expected).square()[:, seen] / expected[seen]).sum())
    freedom = int(seen.sum()) - 1
    p_value = float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2))) if freedom else 1.0
    job.write("law", num_answers=job.scale.num_draws, num_bins=freedom + 1, chi_square=statistic, p_value=p_value)


def _kill(job: Job, engine: Engine, prompt: list[int], num_tokens: int) -> None:
    greedy = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    expected = engine.generate(prompt, greedy, decoding=PLAIN).token_ids
    answer = engine.stream(prompt, greedy, decoding=DECODINGS["chain"])
    killed = time.monotonic()
    for index, _ in enumerate(answer):
        if index == num_tokens // 3 and engine.draft.pid is not None:
            os.kill(engine.draft.pid, signal.SIGKILL)
            killed = time.monotonic()
    num_answers, num_exact = 1, int(answer.generation.token_ids == expected)
    while not engine.draft.num_restarts and time.monotonic() < killed + RETURN_SECONDS:
        tokens = engine.generate(prompt, greedy, decoding=DECODINGS["chain"]).token_ids
        num_answers, num_exact = num_answers + 1, num_exact + (tokens == expected)
    back_seconds = time.monotonic() - killed
    after = engine.generate(prompt, greedy, decoding=DECODINGS["chain"])
    job.write(
        "killed",
        num_losses=len(engine.draft.losses),
        num_restarts=engine.draft.num_restarts,
        seconds=back_seconds,
        num_answers=num_answers + 1,
        num_exact=num_exact + (after.token_ids == expected),
        accepted_after=after.metrics.as_dict()["num_accepted_draft_tokens"],
    )
