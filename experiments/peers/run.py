"""Compare amusd with transformers: `generate`, assisted generation and prompt lookup. Greedy.

Target, draft (`amusd export-draft`), dtype and prompts are the same, and every answer has the same length. transformers
runs with one thread on the core of our target, and with two threads on both cores. Our workers have one thread and one
core each.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `experiments` can be imported from anywhere

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from amusd.console import table
from amusd.errors import PeerError
from experiments.common import Document, middle_half, write_results
from experiments.peers.stock import WAYS, StockTransformers
from experiments.plotting import LOOKS, OUTLINE, caption, run, subplots
from experiments.request import Request, parser_of

if TYPE_CHECKING:
    from amusd.engine import Engine

DTYPE = "bfloat16"
WARM_UP_TOKENS = 8
OURS = "amusd"

Answer = Callable[[Sequence[int], int], tuple[list[int], int]]
"""Prompt and number of tokens -> the tokens, and the nanoseconds they took."""


def main() -> None:
    """Run the script."""
    run(parser_of("peers", __doc__, num_prompts=16, num_tokens=96), measure, draw)


def measure(request: Request, _arguments: object) -> None:
    """Start everything, take turns, write what came out."""
    from launch.environment import describe_environment

    machine = describe_environment()
    per_prompt = answer_all(request)
    rows = rows_of(per_prompt)
    print(rows_text(rows))
    write_results(request, machine, {"rows": rows, "per_prompt": per_prompt})


def answer_all(request: Request) -> list[Document]:
    """Every system on every prompt: `ms_per_token` and `token_ids`' equality with its own plain decoding."""
    from amusd.config import DrafterConfig, EngineConfig, HardwareConfig, TargetConfig
    from amusd.engine import Engine
    from amusd.models.embedded_draft import export_draft
    from amusd.models.embedded_target import embedded_target_path
    from amusd.runtime.cores import allowed_cores, cores_for, pin_to

    prompts = request.load()
    draft = request.runs / "draft"
    export_draft(embedded_target_path(), draft)
    target, hardware = embedded_target_path(), HardwareConfig()
    own_core = cores_for("target", allowed_cores(), hardware)
    with ExitStack() as stack:
        answers: dict[str, Answer] = {}
        for num_threads, cores in ((1, own_core), (2, set[int]())):
            stock = StockTransformers(target, draft, dtype=DTYPE, num_threads=num_threads, cores=cores)
            stack.callback(stock.close)
            for way in WAYS:
                answers[_name("transformers", num_threads, way)] = _of_stock(stock, way)
        drafters = (DrafterConfig(kind="embedded"), DrafterConfig(kind="ngram"))
        target_config = TargetConfig(dtype=DTYPE)
        config = EngineConfig(target=target_config, drafters=drafters, hardware=hardware, prefix_caching=False)
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
    }


def _of_stock(stock: StockTransformers, way: str) -> Answer:
    return lambda prompt, num_tokens: stock.generate(way, prompt, num_tokens)


def _of_engine(engine: Engine) -> Iterator[tuple[str, Answer]]:
    from amusd.config import DecodingConfig, SamplingParams

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
    yield _name(OURS, 2, "chain"), of(DecodingConfig(policy="chain"), "embedded")
    yield _name(OURS, 2, "branching"), of(DecodingConfig(policy="branching"), "embedded")
    for length in (2, 4):
        decoding = DecodingConfig(mode="synchronous", num_speculative_tokens=length)
        yield _name(OURS, 2, f"synchronous, {length} tokens, ngram"), of(decoding, "ngram")


def _name(system: str, num_cores: int, way: str) -> str:
    return f"{system}, {num_cores} core{'s' if num_cores > 1 else ''}: {way}"


def _plain_of(name: str) -> str:
    """The plain decoding that a name is to be compared with: of the same system, and of its cores where it has both."""
    system = name.partition(",")[0]
    return _name(OURS, 1, "plain") if system == OURS else f"{name.partition(':')[0]}: plain"


def rows_of(per_prompt: Sequence[Document]) -> list[Document]:
    """For each system: times over all prompts, and medians over prompts of the ratios to plain decoding."""
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
            "num_prompts": len(per_prompt),
        }
        for name in names
    ]


def rows_text(rows: Sequence[Document]) -> str:
    """A line for each system."""
    header = ("system", "ms/token", "x own plain", "x transformers, 1 core", "as plain")
    lines = [
        (
            row["name"],
            f"{row['ms_per_token']:.1f}",
            f"{row['speedup_vs_own_plain']:.2f}",
            f"{row['speedup_vs_transformers']:.2f}",
            f"{row['num_as_plain']}/{row['num_prompts']}",
        )
        for row in rows
    ]
    return table(header, lines)


def draw(results: Document) -> Any:
    """A bar for each system: the median over prompts, with the middle half as a line."""
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
