"""Triton in processes of its own: interpreted on CPU tensors, or compiled for a GPU that is not here.

Triton decides when it is imported whether its kernels are interpreted (`TRITON_INTERPRET`). So neither may happen in a
process that others use.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import Self

from tests.models.attention_cases import Inputs, Shape


@dataclass(frozen=True)
class Kernel:
    name: str
    spilled_bytes: int
    shared_bytes: int
    num_async_copies: int


class TritonProcess:
    """One child process, as a context. `capability`: what it compiles for (90: Hopper); None: it interprets."""

    def __init__(self, capability: int | None = None) -> None:
        prepare = (_interpret, ()) if capability is None else (_compile_for, (capability,))
        self._executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), *prepare)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._executor.shutdown()

    def attend(self, inputs: Inputs) -> Tensor:
        result: Tensor = pickle.loads(self._executor.submit(_attend, pickle.dumps(inputs)).result())
        return result

    def call(self, function: Callable[[], Any]) -> Any:
        return self._executor.submit(function).result()

    def compile(self, work: Callable[[], None]) -> list[Kernel]:
        """All kernels that `work` launches."""
        return self._executor.submit(_compile, work).result()


def example(shape: Shape, *, seqs: int, rows: int, width: int, paths: int) -> Inputs:
    query = torch.zeros((seqs, rows, shape.heads, shape.dim), dtype=shape.dtype)
    keys, values = torch.zeros((2, shape.key_heads, 16, shape.dim), dtype=shape.dtype)
    table, branches = torch.zeros((seqs, width), dtype=torch.int64), torch.zeros((seqs, paths, rows), dtype=torch.int64)
    lengths, positions = torch.zeros(seqs, dtype=torch.int64), torch.zeros((seqs, rows), dtype=torch.int64)
    return query, keys, values, table, lengths, branches, positions, positions, shape.dim**-0.5


# In the child


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_dot = _dot_in_order


def _dot_in_order(_builder: Any, a: Any, b: Any, d: Any, _precision: Any, _imprecise: Any) -> Any:
    """The interpreter's `tl.dot`, as matrix units compute it: an element of the product has an order of its own.

    In NumPy's product a row's bits depend on its place among the rows, and there is no bfloat16.
    """
    from triton.runtime.interpreter import TensorHandle

    left, right = _float32(a), _float32(b)
    sums = np.zeros(d.data.shape, dtype=np.float32)
    for k in range(left.shape[1]):
        sums += left[:, k : k + 1] * right[k]
    return TensorHandle(sums + d.data, d.dtype.scalar)


def _float32(handle: Any) -> npt.NDArray[np.float32]:
    if handle.dtype.scalar.is_bf16():
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def _attend(sent: bytes) -> bytes:
    from amusd.models.row_attention_triton import attend_rows

    return pickle.dumps(attend_rows(*pickle.loads(sent)))


class _AbsentGpu:
    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile_for(capability: int) -> None:
    os.environ["TRITON_INTERPRET"] = "0"
    torch.set_num_threads(1)
    from triton.runtime import driver

    driver.set_active(_AbsentGpu(capability))


def _compile(work: Callable[[], None]) -> list[Kernel]:
    from triton import knobs
    from triton.runtime.jit import JITFunction

    compiled: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled[kernel.hash] = kernel
        return kernel

    JITFunction.run = compile_only
    try:
        with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
            knobs.cache.dir = folder
            work()
            return [_described(kernel, Path(folder)) for kernel in compiled.values()]
    finally:
        JITFunction.run = run


def _described(kernel: Any, folder: Path) -> Kernel:
    from triton import knobs

    source = folder / "kernel.ptx"
    source.write_text(kernel.asm["ptx"], encoding="utf-8")
    (architecture,) = re.findall(r"^\.target (\w+)", kernel.asm["ptx"], re.MULTILINE)
    assembler = knobs.nvidia.ptxas_blackwell if "_1" in architecture else knobs.nvidia.ptxas
    command = [assembler.path, "-v", f"-arch={architecture}", str(source), "-o", str(folder / "kernel.o")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return Kernel(
        name=kernel.name,
        spilled_bytes=sum(map(int, re.findall(r"(\d+) bytes spill stores", said))),
        shared_bytes=kernel.metadata.shared,
        num_async_copies=len(re.findall(r"cp\.async\.c[ag]", kernel.asm["ptx"])),
    )
