"""Compare amusd with transformers, and with llama.cpp and OpenVINO GenAI where they are installed. Greedy.

Weights and prompts are the same, and every answer has the same length. The others run with one thread on the core of
our target, and with two threads on both cores. Our workers have one thread and one core each.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from amusd.checkpoints.settled import settle
from amusd.config import DecodingConfig, DrafterConfig, EngineConfig, SamplingParams
from amusd.console import table
from amusd.errors import PeerError
from experiments.common import Document, middle_half, write_results
from experiments.peers.native import LlamaCpp, OpenVino
from experiments.peers.process import Models, Runtime, RuntimeProcess, installed
from experiments.peers.stock import Transformers
from experiments.plotting import LOOKS, OUTLINE, caption, run, subplots
from experiments.request import Request, parser_of

if TYPE_CHECKING:
    from amusd.engine import Engine

RUNTIMES = (Transformers, LlamaCpp, OpenVino)
WARM_UP_TOKENS = 8
OURS = "amusd"

Answer = Callable[[Sequence[int], int], tuple[list[int], int]]
"""Prompt and number of tokens -> the tokens, and their time in nanoseconds."""


def main() -> None:
    """Run the script."""
    run(parser_of("peers", __doc__, num_prompts=16, num_tokens=96), measure, draw)


def measure(request: Request, _arguments: object) -> None:
    """Start everything, take turns, write the results."""
    from launch.environment import describe_environment

    machine = describe_environment()
    versions = installed(RUNTIMES)
    drafters = (DrafterConfig(kind="embedded"), DrafterConfig(kind="ngram"))
    config = settle(EngineConfig(drafters=drafters, prefix_caching=False), "cpu")
    per_prompt = answer_all(request, versions, config)
    rows = rows_of(per_prompt)
    print(rows_text(rows))
    named = {kind.name: version for kind, version in versions.items()}
    measured = {"versions": named, "target_dtype": config.target.dtype, "rows": rows, "per_prompt": per_prompt}
    write_results(request, machine, measured)


def answer_all(request: Request, runtimes: Iterable[type[Runtime]], config: EngineConfig) -> list[Document]:
    """Every system on every prompt: `ms_per_token`, and whether its tokens are its own and our plain decoding's."""
    from amusd.checkpoints.embedded_draft import export_draft
    from amusd.checkpoints.embedded_target import embedded_target_path
    from amusd.engine import Engine
    from amusd.runtime.cores import allowed_cores, cores_for, pin_to

    prompts = request.load()
    own_core = cores_for("target", allowed_cores(), config.hardware)
    with ExitStack() as stack:
        files = Path(stack.enter_context(TemporaryDirectory(dir=request.runs)))
        models = Models(target=embedded_target_path(), draft=files / "draft", files=files)
        export_draft(models.target, models.draft)
        answers: dict[str, Answer] = {}
        for runtime in runtimes:
            for num_threads, cores in ((1, own_core), (2, set[int]())):
                process = RuntimeProcess(runtime, models, num_threads=num_threads, cores=cores)
                stack.callback(process.close)
                for way in runtime.ways:
                    answers[_name(runtime.name, num_threads, way)] = partial(process.generate, way)
        engine = stack.enter_context(Engine.start(config))
        pin_to(own_core)  # as a target's worker is
        answers |= dict(_of_engine(engine))
        found = []
        for turn, prompt in enumerate(prompts):
            encoded = engine.encode(prompt.turns)
            if turn == 0:
                for answer in answers.values():
                    answer(encoded, WARM_UP_TOKENS)
            found.append(
                {"number": prompt.number, "category": prompt.category}
                | _take_turns(answers, turn, encoded, request.num_tokens)
            )
            print(f"\r{turn + 1} of {len(prompts)} prompts ", end="", flush=True)
        print()
        return found


def _take_turns(answers: dict[str, Answer], turn: int, prompt: Sequence[int], num_tokens: int) -> Document:
    names = list(answers)
    order = [*names[turn % len(names) :], *names[: turn % len(names)]]
    found = {name: answers[name](prompt, num_tokens) for name in order}
    for name, (tokens, _) in found.items():
        if len(tokens) != num_tokens:
            raise PeerError(f"{name}: {len(tokens)} tokens instead of {num_tokens}")
    return {
        "ms_per_token": {name: found[name][1] / 1e6 / num_tokens for name in names},
        "as_plain": {name: found[name][0] == found[_plain_of(name)][0] for name in names},
        "as_ours": {name: found[name][0] == found[_name(OURS, 1, "plain")][0] for name in names},
    }


def _of_engine(engine: Engine) -> Iterator[tuple[str, Answer]]:
    def of(decoding: DecodingConfig, drafter: str | None) -> Answer:
        def answer(prompt: Sequence[int], num_tokens: int) -> tuple[list[int], int]:
            params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
            done = engine.generate(prompt, params, decoding=decoding, drafter=drafter)
            return list(done.token_ids), done.metrics.total_ns

        return answer

    yield _name(OURS, 1, "plain"), of(DecodingConfig(mode="autoregressive"), None)
    for length in (2, 4):
        decoding = DecodingConfig(mode="synchronous", num_speculative_tokens=length)
        yield _name(OURS, 2, f"synchronous, {length} tokens"), of(decoding, "embedded")
    for policy in ("chain", "branching", "auto"):
        yield _name(OURS, 2, policy), of(DecodingConfig(policy=policy), "embedded")
    for length in (2, 4):
        decoding = DecodingConfig(mode="synchronous", num_speculative_tokens=length)
        yield _name(OURS, 2, f"synchronous, {length} tokens, ngram"), of(decoding, "ngram")


def _name(system: str, num_cores: int, way: str) -> str:
    return f"{system}, {num_cores} core{'s' if num_cores > 1 else ''}: {way}"


def _plain_of(name: str) -> str:
    """The plain decoding to compare with: that of the same system, on as many cores if both were measured."""
    system = name.partition(",")[0]
    return _name(OURS, 1, "plain") if system == OURS else f"{name.partition(':')[0]}: plain"


def rows_of(per_prompt: Sequence[Document]) -> list[Document]:
    """For each system, times over all prompts, and medians over prompts of the ratios to plain decoding."""
    names = list(per_prompt[0]["ms_per_token"])
    stock = _name("transformers", 1, "plain")

    def ratios(reference: str, name: str) -> list[float]:
        return [one["ms_per_token"][reference] / one["ms_per_token"][name] for one in per_prompt]

    return [
        {
            "name": name,
            "ms_per_token": statistics.fmean(one["ms_per_token"][name] for one in per_prompt),
            "speedup_vs_own_plain": statistics.median(ratios(_plain_of(name), name)),
            "speedup_vs_transformers": statistics.median(ratios(stock, name)),
            "num_as_plain": sum(one["as_plain"][name] for one in per_prompt),
            "num_as_ours": sum(one["as_ours"][name] for one in per_prompt),
            "num_prompts": len(per_prompt),
        }
        for name in names
    ]


def rows_text(rows: Sequence[Document]) -> str:
    """A table with a line for each system."""
    header = ("system", "ms/token", "x own plain", "x transformers, 1 core", "as plain", "as ours")
    lines = [
        (
            row["name"],
            f"{row['ms_per_token']:.1f}",
            f"{row['speedup_vs_own_plain']:.2f}",
            f"{row['speedup_vs_transformers']:.2f}",
            *(f"{row[key]}/{row['num_prompts']}" for key in ("num_as_plain", "num_as_ours")),
        )
        for row in rows
    ]
    return table(header, lines)


def draw(results: Document) -> Any:
    """Draw a bar for each system: the median over prompts, with the middle half as a line."""
    names = [row["name"] for row in results["rows"]]
    figure, axes = subplots(width=8.5, height=0.28 * len(names) + 1.4)
    found = [middle_half([one["ms_per_token"][name] for one in results["per_prompt"]]) for name in names]
    colours = [LOOKS["branching" if name.startswith("amusd") else "autoregressive"][0] for name in names]
    middles = [middle for _, middle, _ in found]
    spread = [[middle - low for low, middle, _ in found], [high - middle for _, middle, high in found]]
    axes.barh(range(len(names)), middles, color=colours)
    axes.errorbar(middles, range(len(names)), xerr=spread, fmt="none", ecolor=OUTLINE, elinewidth=0.9)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("time per token, prefill included (ms)")
    figure.supxlabel(caption(results), fontsize=7)
    return figure


if __name__ == "__main__":
    main()
