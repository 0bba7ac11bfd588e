"""Whether the device computes what the CPU does, and whether a row's bits depend only on its path."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from amusd.checkpoints.building import load_model
from amusd.checkpoints.loading import capture_for
from amusd.models.numerics import Numerics
from amusd.models.passes import Paths, Rows
from amusd.models.row_attention import attend_rows
from amusd.runner.load_options import LoadOptions
from amusd.runner.self_test import measure_width_invariance
from experiments.gpu_proof import adapter
from experiments.gpu_proof.checkpoint import VOCAB_SIZE, save_small_pair
from experiments.gpu_proof.environment import token_ids
from experiments.gpu_proof.plan import GPU
from experiments.gpu_proof.records import Job
from experiments.gpu_proof.runner import stream

ROOT = Path(__file__).parents[2]
PYTEST = (
    sys.executable, "-m", "pytest", "-c", str(Path(__file__).with_name("device_tests.ini")), "--rootdir", str(ROOT),
    "-m", "gpu and not nccl and not embedded", str(ROOT / "tests" / "gpu"),
)  # fmt: skip
"""The command that runs the tests of the suite for one GPU."""
_WIDTH_TOKENS = 24
_SMALL_LENGTH = 300


def logits(job: Job) -> None:
    """Rows of a chain and of a tree behind 300 tokens, beside float32 on the CPU, for the weights' dtypes."""
    folder, _ = save_small_pair(job.results / job.part)
    expected = _small_logits(folder, "cpu", "float32")
    for dtype in ("float32", "bfloat16"):
        found = _small_logits(folder, job.scale.device, dtype)
        for name, rows in found.items():
            job.write(
                "logits",
                dtype=dtype,
                rows=name,
                num_rows=len(rows),
                num_equal_choices=int((rows.argmax(-1) == expected[name].argmax(-1)).sum()),
                max_difference=float((rows - expected[name]).abs().max()),
                standard_deviation=float(expected[name].std()),
            )


def _small_logits(folder: Path, device: str, dtype: str) -> dict[str, Tensor]:
    """Logits [rows, vocab] float32 on the CPU."""
    options = LoadOptions(
        numerics=Numerics.for_device(device, width=adapter.WIDTH, fixed=True),
        max_model_len=1024,
        dtype=dtype,
        device=device,
        capture=capture_for(device, cuda_graphs=True),
    )
    model = load_model(folder, options)
    prompt = token_ids(VOCAB_SIZE, _SMALL_LENGTH, 1)
    cache = model.new_cache(512, spare=16)
    model.prefill(prompt[:-6], cache)
    chain = model.run([Rows(prompt[-6:], cache)])[0].logits.float().cpu()
    paths = Paths(np.arange(_SMALL_LENGTH), [[501], [502]])
    tree = model.run([Rows([7, 8], cache, paths=paths)])[0].logits.float().cpu()
    return {"chain": chain, "tree": tree}


def width(job: Job) -> None:
    """Decode greedily one by one, then in ragged blocks and among other paths, behind two shorter prompts."""
    _width(job, (job.scale.lengths[0], job.scale.lengths[-2]))


def long_width(job: Job) -> None:
    """The same behind the longest prompt."""
    _width(job, job.scale.lengths[-1:])


def _width(job: Job, lengths: Sequence[int]) -> None:
    scale = job.scale
    config = adapter.engine_config(scale.device, scale.target, scale.draft, max_model_len=scale.max_model_len)
    model = adapter.prepared_target(config).model
    for length in dict.fromkeys(lengths):
        prompt = token_ids(model.num_ids, length, length)
        found = measure_width_invariance(model, prompt, _WIDTH_TOKENS)
        job.write(
            "width",
            shape=scale.target,
            length=length,
            num_rows=len(found),
            num_equal=found.count(0.0),
            max_difference=max(found),
            num_tracks=model.numerics.tracks_at(length),
        )


def neighbours(job: Job) -> None:
    """Compare the bits of the attention of a sequence alone with those among sequences of other lengths."""
    heads, key_heads, dim, rows = 32, 8, 128, 8
    lengths = [length + place for place, length in enumerate((*job.scale.lengths, 64, 1))]
    operands = sequences(lengths, heads, key_heads, dim, rows, job.scale.device)
    together = attend_rows(*operands, dim**-0.5)
    query, keys, values, table, known, branches, row_paths, positions = operands
    num_equal = 0
    for number in range(len(lengths)):
        own = slice(number, number + 1)
        one = (query[own], keys, values, table[own], known[own], branches[own], row_paths[own], positions[own])
        num_equal += torch.equal(attend_rows(*one, dim**-0.5)[0], together[number])
    job.write("neighbours", num_sequences=len(lengths), num_equal=num_equal, longest=max(lengths))


def sequences(lengths: list[int], heads: int, key_heads: int, dim: int, rows: int, device: str) -> tuple[Tensor, ...]:
    """The operands of `attend_rows`: each sequence has its own slots, and `rows` rows behind its length."""
    generator = torch.Generator(device).manual_seed(1)
    dtype = torch.bfloat16 if device == GPU else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    widest = max(lengths) + rows
    table = torch.arange(len(lengths) * widest, device=device).view(len(lengths), widest)
    known = torch.tensor(lengths, device=device)
    steps = torch.arange(rows, device=device)
    positions = known.unsqueeze(1) + steps  # [seqs, rows]
    branches = table.gather(1, positions).unsqueeze(1)  # one path each
    num_slots = table.numel()
    query = normal(len(lengths), rows, heads, dim)
    keys, values = normal(key_heads, num_slots, dim), normal(key_heads, num_slots, dim)
    return query, keys, values, table, known, branches, torch.zeros_like(positions), positions


def device_tests(job: Job) -> None:
    """Run the suite's tests that need a GPU, without those that need the embedded model or two GPUs."""
    if job.scale.device != GPU:
        job.write("tests", absent="they need a GPU")
        return
    lines: list[str] = []

    def keep(line: str) -> None:
        print(line, flush=True)  # to the part's log, since a time limit may end this process before it returns
        lines.append(line)

    code = stream([*PYTEST, "-v", "-s", "--durations=0"], ROOT, keep)
    job.write("tests", exit_code=code, summary=lines[-1] if lines else "", lines=lines[-40:])
