"""Compare `AsyncProposer` with vLLM's own ways of drafting: the same target, draft, dtype and prompts, greedy.

vLLM has the first core and the draft the last one, as amusd's own engine; vLLM with its own draft is also given both.
All take turns, batch by batch, and every answer has the same length. With `--shrinking` plain vLLM and `AsyncProposer`
answer at lengths so different that the batch shrinks for most of the time. Needs `make vllm`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

import argparse
import json
import select
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from typing_extensions import Self

from amusd.console import table
from amusd.errors import ConfigError, PeerError
from experiments.common import Document, write_results
from experiments.plotting import run
from experiments.request import ROOT, Request, parser_of

PLAIN, PROPOSER, OURS = "vllm, plain", "vllm, AsyncProposer", "amusd, auto"
WARM_UP_TOKENS = 8
REPLY_SECONDS, END_SECONDS = 900, 60
"""Longest time for vLLM to load and compile, or to answer a batch; and to end."""

KILLS = (5, 20, 10)
"""Calls of the proposer, each counted from the kill before."""

VARIANTS: Mapping[str, Document] = {"": {"wait_ms": 0}, ", waits 10 ms": {"wait_ms": 10}}
"""Settings of `AsyncProposer`."""
SHRINKING: Mapping[str, Document] = {
    ", always": {"draft_up_to_rows": 32},
    **{f", up to {number} rows": {"draft_up_to_rows": number} for number in (16, 8, 4)},
}
"""The settings with `--shrinking`."""
MAX_NUM_SEQS = 32
SKEW = 4
SHORTEST = 8
"""The n-th of N lengths is (n / N) ** `SKEW` of the longest, and no shorter than this many tokens."""

Answer = Callable[[Sequence[Sequence[int]], Sequence[int]], Document]
"""Prompts and number of tokens of each answer -> `token_ids`, `seconds`, `counts`."""


def main() -> None:
    """Run the script."""
    parser = parser_of("vllm", __doc__, num_prompts=16, num_tokens=64)
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-vllm/bin/python", help="that has vLLM")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[2, 3], help="of vLLM's own draft")
    parser.add_argument("--both-cores", action="store_true", help="give vLLM's own draft both cores, too")
    parser.add_argument("--candidates", type=int, default=4, help="of AsyncProposer, at most")
    parser.add_argument("--exact", action="store_true", help="plain vLLM and AsyncProposer alone, to compare texts")
    parser.add_argument("--shrinking", action="store_true", help="answers of very different lengths, --tokens at most")
    parser.add_argument("--rounds", type=int, default=1, help="how often all is asked")
    parser.add_argument("--kills", action="store_true", help="kill AsyncProposer's draft in every batch")
    run(parser, measure)


def measure(request: Request, arguments: argparse.Namespace) -> None:
    """Start everything, take turns, write the results."""
    from amusd.checkpoints.embedded_draft import export_draft
    from amusd.checkpoints.embedded_target import embedded_target_path
    from launch.environment import describe_environment

    if not arguments.python.exists():
        raise ConfigError(f"--python={arguments.python}: not there; `make vllm` makes it")
    draft = request.runs / "draft"
    export_draft(embedded_target_path(), draft)
    kills = KILLS if arguments.kills else ()
    with ExitStack() as stack:
        answers: dict[str, Answer] = {}
        for name, settings in systems(arguments, str(embedded_target_path()), str(draft)).items():
            vllm = stack.enter_context(Vllm(arguments.python, settings, request.runs / f"{name}.log"))
            own = variants(vllm, kills, SHRINKING if arguments.shrinking else VARIANTS)
            answers |= own if name == PROPOSER else {name: vllm.answer}
        encode, amusd = _own_engine(stack)
        answers |= {} if arguments.exact or arguments.shrinking else {OURS: amusd}
        prompts = [encode(prompt.turns) for prompt in request.load()]
        for answer in answers.values():
            answer(prompts[:1], [WARM_UP_TOKENS])
        found = [
            _take_turns(answers, prompts[start : start + size], request.num_tokens, size, arguments.shrinking)
            for _ in range(arguments.rounds)
            for size in arguments.batch_sizes
            for start in range(0, len(prompts), size)
        ]
    rows = [row for size in arguments.batch_sizes for row in rows_of([each for each in found if each["size"] == size])]
    print(rows_text(rows))
    write_results(request, describe_environment(), {"rows": rows, "batches": found})


def systems(arguments: argparse.Namespace, target: str, draft: str) -> dict[str, Document]:
    """The settings of each vLLM, for `engine.py`."""
    from amusd.runtime.cores import allowed_cores

    cores = allowed_cores()
    common = {
        "model": target,
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": MAX_NUM_SEQS if arguments.shrinking else 8,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 1 << 29,
    }

    def vllm(own_cores: Sequence[int], **more: Any) -> Document:
        return {"cores": own_cores, "llm": {**common, **more}}

    def drafting(method: str, number: int, **more: Any) -> Document:
        return {"speculative_config": {"method": method, "num_speculative_tokens": number, **more}}

    found = {
        PLAIN: vllm(cores[:1]),
        "vllm, ngram": vllm(cores[:1], **drafting("ngram", 4, prompt_lookup_min=2, prompt_lookup_max=4)),
    }
    for number in arguments.draft_tokens:
        for name, own in (("one core", cores[:1]), ("both cores", cores))[: 1 + arguments.both_cores]:
            found[f"vllm, draft_model, {number} tokens, {name}"] = vllm(
                own, **drafting("draft_model", number, model=draft)
            )
    proposer = drafting("custom_class", arguments.candidates, model="amusd.integrations.vllm.AsyncProposer")
    ours = {"drafter": {"kind": "embedded"}, "cores": cores[-1:], "max_num_seqs": MAX_NUM_SEQS}
    found[PROPOSER] = vllm(cores[:1], **proposer, additional_config={"amusd": ours})
    return {name: found[name] for name in (PLAIN, PROPOSER)} if arguments.exact or arguments.shrinking else found


class Vllm:
    """A process of `engine.py`."""

    exit_code: int | None = None
    """Negative if a signal ended it; None while it runs."""

    def __init__(self, python: Path, settings: Mapping[str, Any], log: Path) -> None:
        """Start it; the context waits until it has loaded."""
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [str(python), str(Path(__file__).with_name("engine.py")), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )

    def __enter__(self) -> Self:
        self._read()
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        with self._process:  # which waits for it, and closes its output
            self.exit_code = self._process.wait()

    def answer(self, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int], **more: Any) -> Document:
        """See `Answer`. `more`: as of `engine.py`."""
        assert self._process.stdin is not None
        order = {"prompts": prompts, "num_tokens": num_tokens, **more}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Document:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], REPLY_SECONDS)[0]:
            raise PeerError(f"vLLM has said nothing for {REPLY_SECONDS} s; see {self._log}")
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"vLLM has ended; {self._log} says why")
        document: Document = json.loads(line)
        return document


def variants(vllm: Vllm, kills: Sequence[int], choices: Mapping[str, Document]) -> dict[str, Answer]:
    """AsyncProposer with each of these settings."""
    return {
        f"{PROPOSER}{name}": partial(vllm.answer, kills=kills, settings=settings) for name, settings in choices.items()
    }


def lengths_of(longest: int, number: int, *, shrinking: bool) -> list[int]:
    """Tokens of each answer of a batch; if `shrinking`, a few are long."""
    if not shrinking:
        return [longest] * number
    return [max(SHORTEST, round(longest * ((index + 1) / number) ** SKEW)) for index in range(number)]


def _own_engine(stack: ExitStack) -> tuple[Callable[[Any], list[int]], Answer]:
    from amusd.config import EngineConfig, HardwareConfig, SamplingParams, TargetConfig
    from amusd.engine import Engine
    from amusd.runtime.cores import allowed_cores, cores_for, pin_to

    hardware = HardwareConfig()
    config = EngineConfig(
        target=TargetConfig(dtype="float32"), hardware=hardware, max_model_len=1024, prefix_caching=False
    )
    engine = stack.enter_context(Engine.start(config))
    pin_to(cores_for("target", allowed_cores(), hardware))

    def answer(prompts: Sequence[Sequence[int]], num_tokens: Sequence[int]) -> Document:
        start = time.perf_counter()
        found = engine.generate([*prompts], SamplingParams(max_new_tokens=num_tokens[0], ignore_eos=True))
        seconds = time.perf_counter() - start
        return {"token_ids": [[*each.token_ids] for each in found], "seconds": seconds, "counts": {}}

    return lambda turns: [*engine.encode(turns)], answer


def _take_turns(
    answers: Mapping[str, Answer], prompts: Sequence[Sequence[int]], num_tokens: int, size: int, shrinking: bool
) -> Document:
    lengths = lengths_of(num_tokens, len(prompts), shrinking=shrinking)
    found = {name: answer(prompts, lengths) for name, answer in answers.items()}
    number = sum(lengths)
    plain = found[PLAIN]["token_ids"]
    same = {
        name: sum(one == other for one, other in zip(each["token_ids"], plain, strict=True))
        for name, each in found.items()
    }
    print(f"{len(prompts)} prompts: " + ", ".join(f"{each['seconds'] / number * 1e3:.1f}" for each in found.values()))
    return {
        "size": size,
        "num_answers": len(prompts),
        "num_tokens": number,
        "ms_per_token": {name: each["seconds"] / number * 1e3 for name, each in found.items()},
        "as_plain": same,
        "counts": {name: each["counts"] for name, each in found.items() if each["counts"]},
    }


def rows_of(batches: Sequence[Document]) -> list[Document]:
    """For each system, milliseconds per token over all batches, and the counts of the proposer's calls."""
    return [
        {
            "name": name,
            "batch_size": batches[0]["size"],
            "ms_per_token": statistics.fmean(each["ms_per_token"][name] for each in batches),
            "seconds": statistics.fmean(each["ms_per_token"][name] * each["num_tokens"] / 1e3 for each in batches),
            "num_as_plain": sum(each["as_plain"][name] for each in batches),
            "num_answers": sum(each["num_answers"] for each in batches),
            "counts": {
                count: sum(each["counts"][name][count] for each in batches)
                for count in batches[0]["counts"].get(name, ())
            },
        }
        for name in batches[0]["ms_per_token"]
    ]


def rows_text(rows: Sequence[Document]) -> str:
    """A table with a line for each system and batch size."""
    header = ("batch", "system", "ms/token", "last token s", "x plain", "as plain", "rows without", "accepted")
    plain = {row["batch_size"]: row["ms_per_token"] for row in rows if row["name"] == PLAIN}
    lines = []
    for row in rows:
        counts = row["counts"]
        lines.append(
            (
                str(row["batch_size"]),
                row["name"],
                f"{row['ms_per_token']:.1f}",
                f"{row['seconds']:.1f}",
                f"{plain[row['batch_size']] / row['ms_per_token']:.2f}",
                f"{row['num_as_plain']}/{row['num_answers']}",
                f"{counts['rows_without']}/{counts['rows']}" if counts else "",
                f"{counts['accepted']}/{counts['proposed']}" if counts else "",
            )
        )
    return table(header, lines)


if __name__ == "__main__":
    main()
