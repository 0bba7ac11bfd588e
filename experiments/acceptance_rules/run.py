"""How often each acceptance rule keeps a candidate of the embedded draft, beside what its formula says.

    python experiments/acceptance_rules/run.py

Synchronous decoding with one candidate a pass, so that every judged candidate stands behind the right prefix and the
acceptance rate is that of single tokens; the model alone drafts, without lookup. Then both models read the answers, the
draft's draws are repeated (they are functions of seed and position), which tells which tokens were judged, and the
formulas are evaluated at those: with p and q the processed distributions of target and draft,

    TV       sum of (p - q)+
    ratio    1 - TV                                              (2211.17192)
    matching sum over i of 1 / sum over j of max(p_j/p_i, q_j/q_i), at least (1 - TV) / (1 + TV)    (2408.07978)
    sharing no noise would accept with sum over i of p_i q_i
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from amusd.config import (
    AcceptanceRule,
    DecodingConfig,
    Distribution,
    DrafterConfig,
    EngineConfig,
    SamplingParams,
    WorkloadConfig,
)
from amusd.engine import Engine
from amusd.models.cached_model import CachedModel
from amusd.models.embedded_draft import load_embedded_draft
from amusd.models.embedded_target import embedded_target_path
from amusd.models.huggingface import load_model
from amusd.models.load_options import LoadOptions
from amusd.models.numerics import Numerics
from amusd.sampling.sampler import DRAFT_SUPPORT, DraftSampler, TokenSampler
from amusd.types import Mode
from amusd.workload import load_prompts

MAX_LENGTH = 1024
RULES: tuple[AcceptanceRule, ...] = ("matching", "rejection")
ONE_CANDIDATE = DecodingConfig(mode=Mode.SYNCHRONOUS, num_speculative_tokens=1)
Probabilities = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Answer:
    """What was decoded under one rule, and how often the candidate stayed."""

    temperature: float
    rule: AcceptanceRule
    seed: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    num_judged: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Formulas:
    """Acceptance at one position, by formula."""

    ratio: float
    matching: float
    matching_bound: float
    unshared: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    temperature: float
    rule: AcceptanceRule
    num_judged: int
    measured: float
    standard_error: float
    formula: float
    matching_bound: float
    unshared: float


def main() -> None:
    """Read the command line, decode, evaluate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", help="a file of prompts; otherwise those of the package")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.3, 0.7, 1.0, 1.5])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    arguments = parser.parse_args()
    answers = decode(arguments.prompts, arguments.num_prompts, arguments.tokens, arguments.temperatures, arguments.seed)
    rows = tabulate(answers)
    print(f"\n{'T':>5} {'rule':<10}{'judged':>8}{'measured':>10}{'+-':>7}{'formula':>9}{'bound':>8}{'unshared':>10}")
    for row in rows:
        bound = f"{row.matching_bound:.3f}" if row.rule == "matching" else "-"
        unshared = f"{row.unshared:.3f}" if row.rule == "matching" else "-"
        print(
            f"{row.temperature:>5g} {row.rule:<10}{row.num_judged:>8}{row.measured:>10.3f}{row.standard_error:>7.3f}"
            f"{row.formula:>9.3f}{bound:>8}{unshared:>10}"
        )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def decode(
    prompts: str | None, num_prompts: int, num_tokens: int, temperatures: Sequence[float], seed: int
) -> list[Answer]:
    """Every prompt at every temperature under both rules."""
    workload = load_prompts(WorkloadConfig(path=prompts, num_prompts=num_prompts))
    drafter = DrafterConfig(kind="embedded", min_lookup=0)
    answers: list[Answer] = []
    with Engine.start(EngineConfig(drafters=(drafter,), max_model_len=MAX_LENGTH)) as engine:
        for number, prompt in enumerate(workload):
            encoded = engine.encode(prompt.turns)
            for temperature in temperatures:
                for rule in RULES:
                    params = SamplingParams(
                        temperature=temperature, acceptance=rule, seed=seed + number, max_new_tokens=num_tokens
                    )
                    answer = engine.generate(encoded, params, decoding=ONE_CANDIDATE)
                    metrics = answer.metrics
                    answers.append(
                        Answer(
                            temperature=temperature,
                            rule=rule,
                            seed=params.seed,
                            prompt=encoded,
                            tokens=answer.token_ids,
                            num_judged=metrics.num_verified,
                            num_accepted=metrics.num_accepted,
                        )
                    )
            print(f"\r{number + 1} of {len(workload)} prompts ", end="", flush=True)
    return answers


def tabulate(answers: Sequence[Answer]) -> list[Row]:
    """Measured and predicted, by temperature and rule."""
    path = str(embedded_target_path())
    options = LoadOptions(numerics=Numerics(width=MAX_LENGTH, fixed=False), max_model_len=MAX_LENGTH)
    target = load_model(path, options)
    draft = load_embedded_draft(path, options, vocab_size=DrafterConfig.vocab_size)
    rows = []
    for temperature, rule in dict.fromkeys((answer.temperature, answer.rule) for answer in answers):
        own = [answer for answer in answers if (answer.temperature, answer.rule) == (temperature, rule)]
        found = [formulas for answer in own for formulas in evaluate(answer, target, draft)]
        judged = sum(answer.num_judged for answer in own)
        measured = sum(answer.num_accepted for answer in own) / judged
        rows.append(
            Row(
                temperature=temperature,
                rule=rule,
                num_judged=judged,
                measured=measured,
                standard_error=(measured * (1 - measured) / judged) ** 0.5,
                formula=statistics.fmean(getattr(f, "ratio" if rule == "rejection" else "matching") for f in found),
                matching_bound=statistics.fmean(f.matching_bound for f in found),
                unshared=statistics.fmean(f.unshared for f in found),
            )
        )
    return rows


def evaluate(answer: Answer, target: CachedModel, draft: CachedModel) -> list[Formulas]:
    """The formulas at every token of an answer that was judged: behind an accepted one comes one that was not."""
    sequence = (*answer.prompt, *answer.tokens)
    p_logits, q_logits = (
        model.forward(sequence, model.new_cache(len(sequence))).logits[len(answer.prompt) - 1 : -1].float().numpy()
        for model in (target, draft)
    )
    assert draft.output_ids is not None  # it has a head of its own
    columns = draft.output_ids.numpy()
    distribution = Distribution(temperature=answer.temperature, acceptance=answer.rule, seed=answer.seed)
    make = DraftSampler if answer.rule == "rejection" else TokenSampler
    sampler = make(distribution, draft.vocab_size, draft.output_ids, prompt=answer.prompt)
    found, index = [], 0
    while index < len(answer.tokens):
        p = softmax(p_logits[index] / answer.temperature)
        q = np.zeros_like(p)
        q[columns] = softmax(q_logits[index] / answer.temperature)
        if answer.rule == "rejection":  # what the draft really draws from
            q[np.argsort(q)[:-DRAFT_SUPPORT]] = 0.0
            q /= q.sum()
        found.append(formulas_of(p, q))
        before = len(answer.prompt) + index - 1
        (drawn,) = sampler.choose(torch.from_numpy(q_logits[index : index + 1]), before, sequence[before : before + 1])
        index += 2 if columns[drawn] == answer.tokens[index] else 1
    return found


def softmax(row: npt.NDArray[np.float32]) -> Probabilities:
    """[ids] -> [ids] in float64."""
    exact: Probabilities = np.exp(row.astype(np.float64) - float(row.max()))
    result: Probabilities = exact / exact.sum()
    return result


def formulas_of(p: Probabilities, q: Probabilities) -> Formulas:
    """[ids] each.

    The sum over j of max(p_j/p_i, q_j/q_i) takes p_j/p_i where p_j/q_j is larger than p_i/q_i, else q_j/q_i: two
    running sums over the ids in the order of that ratio.
    """
    distance = float(np.maximum(p - q, 0.0).sum())
    common = (p > 0) & (q > 0)
    only_p = float(p[~common].sum())
    pc, qc = p[common], q[common]
    order = np.argsort(-(pc / qc))
    pc, qc = pc[order], qc[order]
    before = np.cumsum(pc) - pc + only_p
    behind = float(qc.sum()) - (np.cumsum(qc) - qc) + float(q[~common].sum())
    return Formulas(
        ratio=1 - distance,
        matching=float((1 / (before / pc + behind / qc)).sum()),
        matching_bound=(1 - distance) / (1 + distance),
        unshared=float((p * q).sum()),
    )


if __name__ == "__main__":
    main()
