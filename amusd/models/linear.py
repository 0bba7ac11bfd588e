"""Matrix products of few rows: weights packed once for the CPU's kernels where that helps, plain ones elsewhere.

oneDNN multiplies from a blocked layout. `torch.nn.functional.linear` converts the weights to it at every call; packed
beforehand, the linear layers of the embedded target take 16 instead of 25 ms for one row, and 16 instead of 31 for
eight (one core of an AVX-512 BF16 machine; docs/log.md). The operators are those that torch's own compiler emits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from amusd.errors import UnsupportedModelError

_PACKED_FOR_ROWS = 8
"""Rows that the packed layout is laid out for; any number may be multiplied."""
_OPERATORS = ("_linear_pointwise", "_reorder_linear_weight")
"""What packing needs of `torch.ops.mkldnn`."""


class Linear(Protocol):
    """`x @ weight.T + bias`."""

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        ...

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        ...

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """`residual` [rows, out] plus the product; `residual` itself may be overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class Weights:
    """What a linear layer multiplies with and adds."""

    matrix: Tensor
    """[out, in]"""
    bias: Tensor | None = None
    """[out]"""
    scale: Tensor | None = None
    """[out, 1] float32: what each row of a matrix in FP8 is to be multiplied with."""

    @classmethod
    def of(cls, projection: Any) -> Weights:
        """Those of a `torch.nn.Linear` or an `Fp8Projection`."""
        bias = None if projection.bias is None else projection.bias.detach()
        return cls(projection.weight.detach(), bias, getattr(projection, "weight_scale", None))

    @classmethod
    def join(cls, parts: Sequence[Weights]) -> Weights:
        """One layer whose outputs are those of `parts`, side by side.

        Raises `UnsupportedModelError` if some of these are in FP8 and some are not.
        """
        matrices = [part.matrix for part in parts]
        if len({matrix.dtype for matrix in matrices}) > 1:
            raise UnsupportedModelError("some of the weights that share a product are in FP8, and some are not")
        biases = [part.bias for part in parts if part.bias is not None]
        filled = [biases[0].new_zeros(len(part.matrix)) if part.bias is None else part.bias for part in parts if biases]
        scales = [part.scale for part in parts if part.scale is not None]
        return cls(torch.cat(matrices), torch.cat(filled) if filled else None, torch.cat(scales) if scales else None)

    def outputs(self, order: Tensor) -> Weights:
        """A copy with the outputs that `order` names."""
        return self.each(lambda tensor: tensor[order])

    def inputs(self, order: Tensor) -> Weights:
        """A copy with the inputs that `order` names."""
        bias, scale = (None if tensor is None else tensor.clone() for tensor in (self.bias, self.scale))
        return Weights(self.matrix[:, order], bias, scale)

    def to(self, device: torch.device, *, copy: bool = False) -> Weights:
        """The same on `device`. `copy`: always new tensors; a view would keep a whole checkpoint file mapped."""
        return self.each(lambda tensor: tensor.to(device, copy=copy))

    def each(self, change: Callable[[Tensor], Tensor]) -> Weights:
        """The same with `change` applied to matrix, bias and scale; it may select outputs."""
        bias, scale = (None if tensor is None else change(tensor) for tensor in (self.bias, self.scale))
        return Weights(change(self.matrix), bias, scale)


MakeLinear: TypeAlias = Callable[[Weights], Linear]
"""The weights may be dropped afterwards."""


def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The fastest linear layer for where `weight` [out, in] is. The tensor itself may be dropped afterwards."""
    if can_pack(weight):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def can_pack(weight: Tensor) -> bool:
    """Whether this build of torch has packed products for this weight's device and dtype."""
    return why_not_packed(weight.device, weight.dtype) is None


def why_not_packed(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why `make_linear` leaves weights of `dtype` on `device` as they are; None if it packs them."""
    if device.type != "cpu":
        return f"they are on {device}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"there are no packed products in {str(dtype).removeprefix('torch.')}"
    if not torch._C._has_mkldnn:  # noqa: SLF001 - its public name is untyped
        return "this build of torch has no oneDNN"
    if not all(hasattr(torch.ops.mkldnn, name) for name in _OPERATORS):
        return "this build of torch lacks oneDNN's packed products"
    if dtype is torch.bfloat16 and not can_multiply_bfloat16():
        return "oneDNN does not compute bfloat16 on this CPU"
    return None


def can_multiply_bfloat16() -> bool:
    """Whether oneDNN multiplies matrices in bfloat16 on this CPU, with sums in float32."""
    if not torch._C._has_mkldnn:  # noqa: SLF001 - its public name is untyped
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 - no public name


def fastest_dtype(device: torch.device) -> str:
    """The dtype in which checkpoints in 16 bits are computed on `device`: bfloat16, or float32 on CPUs that lack it.

    float32 holds the same weights; with AVX2 alone it multiplies 8 rows in a third of the time (docs/log.md).
    """
    return "bfloat16" if device.type != "cpu" or can_multiply_bfloat16() else "float32"


class PlainLinear:
    """A `Linear` over the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias."""
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        return F.linear(rows, self._weight, self._bias)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """See `Linear`."""
        if self._bias is None and residual.is_cuda:
            return residual.addmm_(rows, self._weight.t())  # elsewhere the residual would be copied first
        if self._bias is None:
            return torch.addmm(residual, rows, self._weight.t())
        return residual + F.linear(rows, self._weight, self._bias)


class PackedLinear:
    """A `Linear` over a copy of the weight in oneDNN's blocked layout, of the same size."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        # The same operators without Python's look-ups per call.
        self._multiply = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001 - no public name
        self._multiply_add = torch.ops.mkldnn._linear_pointwise.binary  # noqa: SLF001 - no public name
        pack = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001 - no public name
        self._weight = pack(weight.contiguous(), _PACKED_FOR_ROWS)
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        result: Tensor = self._multiply(rows, self._weight, self._bias, "none", [], "")
        return result

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """`residual` [rows, out] plus the product, as a new tensor; summed before rounding."""
        result: Tensor = self._multiply_add(rows, residual, self._weight, self._bias, "add")
        return result
