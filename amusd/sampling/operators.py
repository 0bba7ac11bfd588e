"""Operators with two implementations: torch on any device, a faster Triton kernel on GPUs."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

_Compute: TypeAlias = Callable[..., Tensor]


class Triton:
    """Whether Triton computes operators on this process's GPUs; otherwise torch does."""

    is_used = True


@contextlib.contextmanager
def without_triton() -> Iterator[None]:
    """Make torch compute the operators on GPUs, in all threads."""
    before, Triton.is_used = Triton.is_used, False
    try:
        yield
    finally:
        Triton.is_used = before


def register_triton(module: str, *, mutates: str | None = None) -> Callable[[_Compute], Any]:
    """Register an operator of torch; on GPUs the function of the same name in `module` computes it.

    `module` imports triton. `mutates`: the argument to write, if any.
    """

    def register(ordinary: _Compute) -> Any:
        name = ordinary.__name__

        def launch(first: Tensor, *others: Any) -> Tensor:
            kernel: _Compute = getattr(importlib.import_module(module), name) if Triton.is_used else ordinary
            with torch.cuda.device(first.device):  # Triton launches on the current device
                return kernel(first, *others)

        written = () if mutates is None else (mutates,)
        operator = torch.library.custom_op(f"amusd::{name}", ordinary, mutates_args=written, device_types="cpu")
        operator.register_kernel("cuda")(launch)
        return operator

    return register
