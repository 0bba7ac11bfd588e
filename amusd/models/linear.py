"""Linear layers for passes of few rows: packed or plain in the weights' dtype, in float16, in int8 for drafts.

Packed. oneDNN multiplies from a blocked layout. `torch.nn.functional.linear` converts the weights to it at every call;
packed beforehand, the linear layers of the embedded target take 16 instead of 25 ms for one row, and 16 instead of 31
for eight (one core of an AVX-512 BF16 machine; docs/log.md). The operators are those that torch's own compiler emits.

float16, for rows in float32 on CPUs. A pass of few rows takes as long as its weights take to read. Weights that come in
16 bits fit in float16 (but for numbers below 2^-17, which it rounds by 2^-25 at most) and are made float32 again in
registers; products and sums are those of float32. With AVX2 alone the linear layers of the embedded target take 22
instead of 44 ms for one row, 26 instead of 60 for six, and 42 instead of 72 for eight (docs/log.md). The operators are
FBGEMM's.

int8, for drafts on CPUs. A quarter of the bytes of float32, and several products of bytes in each lane. Weights have a
scale per output, inputs one scale per product: a row's result depends on the other rows, which a draft may and a target
must not. In a pass over several sequences each row has its own scale (`InputScales`), which takes 15 us a product more.
CPUs without VNNI add two products in 16 bits, which hold them if weights have seven bits. The rounding costs a draft
next to no agreement (docs/log.md); the text is verified. The operators are those of torch's dynamic quantization
(FBGEMM).
"""

from __future__ import annotations

import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

_PACKED_FOR_ROWS = 8
"""Rows that the packed layout is laid out for; any number may be multiplied."""
_PACKED_OPERATORS = ("_linear_pointwise", "_reorder_linear_weight")
"""Operators of `torch.ops.mkldnn` that packing needs."""

_FBGEMM_ENGINES = ("fbgemm", "x86")
"""Values of `torch.backends.quantized.engine` where FBGEMM multiplies."""

_FP16_OPERATORS = ("linear_prepack_fp16", "linear_dynamic_fp16")
"""Operators of `torch.ops.quantized` that products with weights in float16 need."""
_LARGEST_FP16_ERROR = 2.0**-25
"""Half the distance of the smallest numbers of float16."""

INT8 = "int8"
"""The name of this dtype in a configuration."""
_SCALED_PRODUCT = "linear_with_input_q_dq_qweight_dq_output_fp32"
"""The operator of torch that multiplies inputs whose scale is given."""
_INT8_OPERATORS = ("linear_prepack", "linear_dynamic", _SCALED_PRODUCT)
"""Operators of `torch.ops.quantized` that int8 products need."""
_MAKE_QUANTIZED = "_make_per_channel_quantized_tensor"
"""The function of torch that turns bytes and scales into the input of `linear_prepack`."""
_LARGEST_INT8 = 127
"""The range is symmetric."""
_LARGEST_WITHOUT_VNNI = 64
"""Two products of such a weight and an input of 255 fit in 16 bits together."""


class Linear(ABC):
    """`x @ weight.T + bias`."""

    nbytes: int
    """Bytes of weight, scales and bias."""

    @abstractmethod
    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """`residual` [rows, out] plus the product; `residual` itself may be overwritten."""
        return residual + self(rows)


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a linear layer."""

    matrix: Tensor
    """[out, in]"""
    bias: Tensor | None = None
    """[out]"""

    @classmethod
    def pop(cls, weights: dict[str, Tensor], name: str) -> Weights:
        """Those of the layer `name` among the weights of a model, which no longer hold them."""
        return cls(weights.pop(f"{name}.weight"), weights.pop(f"{name}.bias", None))

    @classmethod
    def join(cls, parts: Sequence[Weights]) -> Weights:
        """One layer whose outputs are those of `parts`, side by side."""
        biases = [part.bias for part in parts if part.bias is not None]
        filled = [biases[0].new_zeros(len(part.matrix)) if part.bias is None else part.bias for part in parts if biases]
        return cls(torch.cat([part.matrix for part in parts]), torch.cat(filled) if filled else None)

    def outputs(self, order: Tensor) -> Weights:
        """A copy with the outputs that `order` names."""
        return self.each(lambda tensor: tensor[order])

    def inputs(self, order: Tensor) -> Weights:
        """A copy with the inputs that `order` names."""
        return Weights(self.matrix[:, order], None if self.bias is None else self.bias.clone())

    def to(self, device: torch.device, *, copy: bool = False) -> Weights:
        """The same on `device`. `copy`: always new tensors; a view would keep a whole checkpoint file mapped."""
        return self.each(lambda tensor: tensor.to(device, copy=copy))

    def each(self, change: Callable[[Tensor], Tensor]) -> Weights:
        """The same with `change` applied to matrix and bias; it may select outputs."""
        return Weights(change(self.matrix), None if self.bias is None else change(self.bias))


MakeLinear: TypeAlias = Callable[[Weights], Linear]
"""Makes a linear layer of weights, which may be dropped afterwards."""


def make_linear(weights: Weights, dtype: torch.dtype) -> Linear:
    """The fastest linear layer for rows of `dtype` where the weights are. These may be dropped afterwards."""
    if multiplies_fp16(weights.matrix.device, dtype) and fits_fp16(weights.matrix):
        return Fp16Linear(weights.matrix, weights.bias)
    weights = weights.each(lambda tensor: tensor.to(dtype))
    kind = PackedLinear if can_pack(weights.matrix.device, dtype) else PlainLinear
    return kind(weights.matrix, weights.bias)


@dataclass(slots=True)
class InputScales:
    """How the int8 layers of a model scale the inputs of their next products."""

    by_row: bool = False
    """True: a row's result does not depend on the other rows. False: one scale per product."""


def make_int8(weights: Weights, scales: InputScales) -> Linear:
    """An int8 layer whose inputs are scaled as `scales` says."""
    return Int8Linear(weights.matrix, weights.bias, scales)


def fastest_dtype(device: torch.device) -> str:
    """The dtype in which checkpoints in 16 bits are computed on `device`: bfloat16, or float32 on CPUs that lack it.

    float32 holds the same weights; with AVX2 alone it multiplies 8 rows in a third of the time, and with the weights in
    float16 in a fifth (docs/log.md).
    """
    return "bfloat16" if device.type != "cpu" or can_multiply_bfloat16() else "float32"


def can_multiply_bfloat16() -> bool:
    """Whether oneDNN multiplies matrices in bfloat16 on this CPU, with sums in float32."""
    if not torch._C._has_mkldnn:  # noqa: SLF001 - its public name is untyped
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 - no public name


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of torch has packed products with weights of `dtype` on `device`."""
    has_operators = torch._C._has_mkldnn and all(  # noqa: SLF001 - its public name is untyped
        hasattr(torch.ops.mkldnn, name) for name in _PACKED_OPERATORS
    )
    if device.type != "cpu" or not has_operators:
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and can_multiply_bfloat16())


def multiplies_fp16(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are products of weights in float16 and rows of `dtype` on `device`."""
    return device.type == "cpu" and dtype is torch.float32 and _why_not_fbgemm(_FP16_OPERATORS) is None


def fits_fp16(matrix: Tensor) -> bool:
    """Whether float16 holds a matrix; it rounds numbers below 2^-17 by 2^-25 at most, and that counts as held.

    It has more digits than bfloat16, whose numbers it holds up to its largest one.
    """
    if matrix.dtype is torch.bfloat16:
        return bool(matrix.abs().max() <= torch.finfo(torch.float16).max)
    return bool(matrix.half().float().sub_(matrix).abs_().max() <= _LARGEST_FP16_ERROR)


def why_not_int8(device: torch.device) -> str | None:
    """Why there are no int8 products on `device`; None if there are."""
    if device.type != "cpu":
        return f"not on {device}"
    return _why_not_fbgemm((*_INT8_OPERATORS, _MAKE_QUANTIZED))


def _why_not_fbgemm(names: Sequence[str]) -> str | None:
    """Why these operators of `torch.ops.quantized`, or functions of torch, are not to be had here; None if they are."""
    engine = torch.backends.quantized.engine
    if engine not in _FBGEMM_ENGINES:
        return f"torch multiplies them with {engine} here, allowed: {' or '.join(_FBGEMM_ENGINES)}"
    found = all(hasattr(torch.ops.quantized, name) or hasattr(torch, name) for name in names)
    return None if found else "this build of torch lacks them"


def largest_int8_weight() -> int:
    """The largest int8 weight whose products this CPU sums without overflow."""
    has_vnni = torch.cpu._is_vnni_supported()  # noqa: SLF001 - no public name
    return _LARGEST_INT8 if has_vnni else _LARGEST_WITHOUT_VNNI


class PlainLinear(Linear):
    """A `Linear` over the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.nbytes = _num_bytes(weight, bias)
        self._weight = weight
        self._bias = bias

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


class PackedLinear(Linear):
    """A `Linear` over a copy of the weight in oneDNN's blocked layout, of the same size."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.nbytes = _num_bytes(weight, bias)
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


class Fp16Linear(Linear):
    """A `Linear` over a copy of the weight in float16; float32 in and out, and in all sums."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` [out, in] of values that `fits_fp16`, `bias` [out] float32, on the CPU."""
        self.nbytes = weight.numel() * torch.float16.itemsize + _num_bytes(bias)
        self._multiply = _function("linear_dynamic_fp16")
        self._weight = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, in] float32 -> [rows, out] float32."""
        number = len(rows)
        missing = _num_even_rows(number) - number
        result: Tensor = self._multiply(F.pad(rows, (0, 0, 0, missing)) if missing else rows, self._weight)
        return result[:number] if missing else result

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """`residual` [rows, out] plus the product, as a new tensor."""
        return self(rows).add_(residual)


class Int8Linear(Linear):
    """A `Linear` over a copy of the weight in int8; float32 in and out."""

    def __init__(self, weight: Tensor, bias: Tensor | None, input_scales: InputScales) -> None:
        """`weight` [out, in], `bias` [out]: of any floating dtype, on the CPU."""
        values, scales = to_int8(weight, largest_int8_weight())
        self.nbytes = _num_bytes(values, bias, scales)
        self._input_scales = input_scales
        self._sums = values.sum(1, dtype=torch.float32) * scales.flatten()  # [out], of the weights as they are rounded
        self._bias = None if bias is None else bias.float()
        self._multiply = _function("linear_dynamic")
        self._multiply_scaled = _function(_SCALED_PRODUCT)
        zeros = torch.zeros(len(scales), dtype=torch.long)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*quantize.* deprecated", category=UserWarning)
            packable = getattr(torch, _MAKE_QUANTIZED)(values, scales.flatten().double(), zeros, 0)
        self._weight = torch.ops.quantized.linear_prepack(packable, None if bias is None else bias.float())

    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, in] float32 -> [rows, out] float32."""
        if self._input_scales.by_row:
            return self._multiply_each(rows)
        result: Tensor = self._multiply(rows, self._weight, reduce_range=False)
        return result

    def _multiply_each(self, rows: Tensor) -> Tensor:
        """The product with a scale and a zero for each row, whose smallest number becomes 0 and its largest 255."""
        smallest, largest = torch.aminmax(rows, dim=1, keepdim=True)
        span = (largest - smallest).clamp_min_(1e-12)
        product = self._multiply_scaled(rows.sub(smallest).div_(span), 1 / 255, 0, self._weight)  # plus the bias
        result = torch.addcmul(smallest * self._sums, product, span)
        return result if self._bias is None else result.addcmul_(self._bias, 1 - span)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """`residual` [rows, out] plus the product, as a new tensor."""
        return self(rows).add_(residual)


def _function(name: str) -> Callable[..., Tensor]:
    """An operator of `torch.ops.quantized` as the function behind it.

    Operators whose weight is an object look through their arguments in Python at each call: 10 us.
    """
    function: Callable[..., Tensor] = getattr(torch.ops.quantized, name).default._op  # noqa: SLF001 - no public name
    return function


@cache
def _num_even_rows(least: int) -> int:
    """The least number of rows from `least` on that FBGEMM computes alike, wherever a row stands.

    It divides rows among kernels of several heights, of which those of one and of two rows add in another order.
    """
    random = torch.Generator().manual_seed(0)
    weight, row = (torch.randn(number, 64, generator=random) for number in (32, 1))
    weight = torch.ops.quantized.linear_prepack_fp16(weight, None)
    for number in itertools.count(least):
        results = torch.ops.quantized.linear_dynamic_fp16(row.repeat(number, 1), weight)
        if bool((results == results[0]).all()):
            break
    return number


def to_int8(matrix: Tensor, largest: int = _LARGEST_INT8) -> tuple[Tensor, Tensor]:
    """[rows, columns] -> int8 of that shape, and float32 [rows, 1]: the largest weight of a row becomes `largest`."""
    weights = matrix.detach().float()
    scales = weights.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / largest
    return (weights / scales).round().to(torch.int8), scales


def _num_bytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
