"""The quickest check of a new machine: does each mechanism of the GPU path work at all? Under a minute on a GPU.

Every step is tried, whatever became of the others, and leaves one record `smoke`.
"""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from amusd.checkpoints.building import prepare_device
from amusd.checkpoints.loading import capture_for
from amusd.checkpoints.synthetic import SHAPES
from amusd.config import Distribution
from amusd.errors import first_line
from amusd.models.attention import Window
from amusd.models.fused import add_and_norm, rotate_and_store, silu_and_multiply
from amusd.models.row_attention import attend_rows
from amusd.runner.graphs import Replay, run_each_time
from amusd.runner.process_group import MANY_ROWS, ProcessGroup
from amusd.sampling.noise import Domain, codes_of, key_of, noisy_scores
from amusd.sampling.ranking import RowRanker
from amusd.sampling.sampler import Level, RowSampler, SamplingState
from amusd.sampling.sampler_inputs import SamplerInputs
from experiments.gpu_proof.correctness import sequences
from experiments.gpu_proof.plan import GPU, Scale
from experiments.gpu_proof.records import Job

ABSENT = "needs a GPU"
ROWS = 8
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
"""Largest allowed difference of a kernel's result from the CPU's: absolute, and relative for values above 1."""

HEADS = ((4, 64), (4, 128), (7, 128), (8, 128), (1, 96), (2, 256))
"""Query heads per key head, and head dimension; attention is compiled for each pair."""

Case = tuple[str, Callable[..., "tuple[Tensor, ...]"], "tuple[Any, ...]"]
"""A kernel's name, what runs it, and its operands on the CPU."""


def smoke(job: Job) -> None:
    """Try every step. Raises `SystemExit` at the end if one of them failed."""
    failed = []
    for step in (compiler, kernels, sampler, group):
        started, error = time.perf_counter(), ""
        try:
            holds = step(job)
        except Exception as problem:  # noqa: BLE001 - the other steps are tried nevertheless
            traceback.print_exc()
            holds, error = False, f"{type(problem).__name__}: {first_line(problem)}"
        job.write("smoke", step=step.__name__, holds=holds, seconds=time.perf_counter() - started, error=error)
        if not holds:
            failed.append(step.__name__)
    if failed:
        raise SystemExit(f"smoke: {', '.join(failed)} did not hold")


def compiler(job: Job) -> bool:
    """Check the compiler of Triton's launcher, and launch a first kernel."""
    names = [os.environ.get("CC", ""), "gcc", "clang"]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    started = time.perf_counter()
    prepare_device(job.scale.device)  # nothing on a CPU
    seconds = time.perf_counter() - started
    launched: dict[str, Any] = {"seconds": seconds} if job.scale.device == GPU else {"absent": ABSENT}
    job.write("compiler", compiler=found, has_python_h=header.is_file(), **launched)
    return True


def kernels(job: Job) -> bool:
    """Compare each Triton kernel with the operators of torch on the CPU."""
    if job.scale.device != GPU:
        job.write("kernel", absent=ABSENT)
        return True
    found = [compared(case, dtype, job.scale.device) for dtype in TOLERANCE for case in kernel_cases(dtype)]
    for one in found:
        job.write("kernel", **one)
    return all(one["holds"] for one in found)


def kernel_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Every operator that is a Triton kernel on a GPU, with operands in `dtype`."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def rotate(joint: Tensor, rotation: Tensor, norm: Tensor, storage: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        return rotate_and_store(joint, rotation, norm, storage, slots, 8, 1e-5), storage

    query_heads, key_heads, dim = 8, 2, 64
    angles = torch.randn((ROWS, dim // 2), generator=generator)
    norm = torch.rand((query_heads + key_heads, dim), generator=generator)
    storage, slots = torch.zeros((2 * key_heads, 40, dim), dtype=dtype), torch.randperm(40, generator=generator)[:ROWS]
    joint = normal(ROWS, query_heads + 2 * key_heads, dim)
    yield "rotate_and_store", rotate, (joint, torch.polar(torch.ones_like(angles), angles), norm, storage, slots)
    of_ranks = normal(ROWS, 3000), normal(3, ROWS, 3000), normal(3000)
    yield "add_and_norm", lambda hidden, *rest: (add_and_norm(hidden, *rest, 1e-5), hidden), of_ranks
    yield "silu_and_multiply", lambda rows: (silu_and_multiply(rows),), (normal(ROWS, 3000),)
    for group_size, dim in HEADS:
        operands = sequences([5, 300], 2 * group_size, 2, dim, ROWS, "cpu")
        scores = tuple(each.to(dtype) if each.is_floating_point() else each for each in operands)
        yield "attend_rows", lambda *rows, dim=dim: (attend_rows(*rows, dim**-0.5),), scores
        yield "attend_rows", partial(_attend_near, scaling=dim**-0.5), scores
    bits = codes_of(5000), torch.from_numpy(_keys(5).view(np.int64))
    yield "noisy_scores", lambda *rows: (noisy_scores(*rows),), (normal(ROWS, 5000), *bits, torch.ones(ROWS))


def _attend_near(*rows: Tensor, scaling: float) -> tuple[Tensor, ...]:
    return (attend_rows(*rows, scaling, 0.0, None, Window(70).first(rows[-1])),)


def compared(case: Case, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """The largest difference of a kernel on `device` from the CPU, and whether it is small."""
    name, run, operands = case

    def on(device: str) -> tuple[Tensor, ...]:
        given = (each.to(device, copy=True) if isinstance(each, Tensor) else each for each in operands)
        return tuple(result.float().cpu() for result in run(*given))

    pairs = list(zip(on(device), on("cpu"), strict=True))
    bound = TOLERANCE[dtype]
    return {
        "name": name,
        "dtype": str(dtype).removeprefix("torch."),
        "max_difference": max(float((found - expected).abs().max()) for found, expected in pairs),
        "holds": all(torch.allclose(found, expected, atol=bound, rtol=bound) for found, expected in pairs),
    }


def sampler(job: Job) -> bool:
    """Compare samplers in a captured pass, replayed with other logits, with a CPU, and row by row."""
    device, num_columns = torch.device(job.scale.device), int(SHAPES[job.scale.target]["vocab_size"])
    holds = []
    for kind, level in itertools.product((RowSampler, RowRanker), (Level.PLAIN, Level.FILTERED, Level.PENALIZED)):
        here, there = (kind(SamplingState(num_columns, device=where), level) for where in (device, "cpu"))
        logits, inputs = _logits(num_columns, 1).to(device), _inputs(here, 1).to(device)
        found: list[Tensor] = []
        with torch.inference_mode():
            replay = _capture(job.scale)(partial(_sample, here, logits, inputs, found))
            logits.copy_(_logits(num_columns, 2))
            inputs.copy_(_inputs(here, 2))
            replay()
            columns, outputs = (each.cpu() for each in found)
            expected, _ = there.compute(_logits(num_columns, 2), _inputs(there, 2))
            alone = [here.compute(logits[row : row + 1], inputs[row : row + 1]) for row in range(ROWS)]
        num_equal = int((columns == expected).sum())
        num_same = sum(
            torch.equal(column.cpu()[0], columns[row]) and torch.equal(own.cpu()[0], outputs[row])
            for row, (column, own) in enumerate(alone)
        )
        facts = {"num_rows": ROWS, "num_equal_choices": num_equal, "num_same_bits_alone": num_same}
        name = f"{kind.__name__} {level.name.lower()}"
        job.write("sampler", name=name, captured=job.scale.device == GPU, **facts)
        holds.append(num_equal == ROWS and (kind is RowRanker or num_same == ROWS))
    return all(holds)


def _sample(sampler: RowSampler, logits: Tensor, inputs: Tensor, found: list[Tensor]) -> None:
    found[:] = sampler.compute(logits, inputs)


def _logits(num_columns: int, seed: int) -> Tensor:
    return torch.randn((ROWS, num_columns), generator=torch.Generator().manual_seed(seed)).mul_(3)


def _inputs(sampler: RowSampler, seed: int) -> Tensor:
    """Rows at temperature 0.7, and with top-p if the level has filters; nothing is known beside the logits."""
    distribution = Distribution(temperature=0.7, top_p=0.9 if sampler.level else 1.0)
    packed = np.tile(sampler.state.packed_inputs(distribution), (ROWS, 1))
    SamplerInputs.of(packed).key.view(np.uint64)[:] = _keys(seed)
    return torch.from_numpy(packed)


def _keys(seed: int) -> npt.NDArray[np.uint64]:
    return np.array([key_of(seed, row, Domain.MATCHING) for row in range(ROWS)], dtype=np.uint64)


def _capture(scale: Scale) -> Callable[[Callable[[], None]], Replay]:
    return capture_for(scale.device, cuda_graphs=True) or run_each_time


def group(job: Job) -> bool:
    """Try ranks within one process: every exchange, the same in a graph, and an abort. NCCL on a GPU, else gloo."""
    device = job.scale.device
    store = job.results / job.part / "store"
    store.mkdir(parents=True)
    ranks = ProcessGroup(0, 1, str(store), "nccl" if device == GPU else "gloo")
    num_threads = threading.active_count()
    ranks.form(device)
    part = torch.randn((MANY_ROWS, 512)).to(device)
    found: list[Tensor] = []

    def work() -> None:
        few = part[:ROWS]  # which are gathered; many are exchanged in shares
        found[:] = [ranks.join(few), ranks.parts(few)[0], ranks.parts(part)[0], ranks.whole(part, len(part))]

    def holds() -> bool:
        return all(torch.equal(each, part[: len(each)]) for each in found)

    work()
    exchanged, replayed = holds(), None
    if device == GPU:
        replay = _capture(job.scale)(work)
        part.neg_()
        replay()
        torch.cuda.synchronize()
        replayed = holds()
        del replay  # an abort waits for graphs that hold exchanges
        gc.collect()
    started = time.perf_counter()
    ranks.abort()
    aborted = threading.active_count() == num_threads
    job.write(
        "group",
        backend="nccl" if device == GPU else "gloo",
        exchanged=exchanged,
        replayed=ABSENT if replayed is None else replayed,
        aborted=aborted,
        abort_seconds=time.perf_counter() - started,
    )
    return exchanged and replayed is not False and aborted
