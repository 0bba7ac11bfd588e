"""Linear layers for passes of few rows, whose time is that of reading the weights (measured in docs/log.md).

Packed: oneDNN's blocked layout. float16: weights that float16 holds, with float32 rows and sums, on x86 CPUs (FBGEMM).
int8: for drafts on x86 CPUs, with a scale per output (FBGEMM).
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from amusd.errors import ConfigError

_PACKED_FOR_ROWS = 8
_LARGEST_FP16_ERROR = 2.0**-25
_BFLOAT16_CAPABILITY = 8
_ENGINES = ("fbgemm", "x86")

INT8 = "int8"
_LARGEST_INT8 = 127
_LARGEST_WITHOUT_VNNI = 64


class Linear(ABC):
    """`x @ weight.T + bias`."""

    @abstractmethod
    def __call__(self, rows: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """`residual` [rows, out] plus the product; may overwrite `residual`."""
        return self(rows).add_(residual)


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a linear layer."""

    matrix: Tensor
    """[out, in]."""
    bias: Tensor | None = None

    @classmethod
    def pop(cls, weights: dict[str, Tensor], name: str) -> Weights:
        """Take the layer `name` out of a model's weights."""
        return cls(weights.pop(f"{name}.weight"), weights.pop(f"{name}.bias", None))

    @classmethod
    def join(cls, parts: Sequence[Weights]) -> Weights:
        """One layer with the outputs of `parts` side by side."""
        biases = [part.bias for part in parts if part.bias is not None]
        filled = [biases[0].new_zeros(len(part.matrix)) if part.bias is None else part.bias for part in parts if biases]
        return cls(torch.cat([part.matrix for part in parts]), torch.cat(filled) if filled else None)

    def each(self, change: Callable[[Tensor], Tensor]) -> Weights:
        """Apply `change`, which may select outputs, to matrix and bias."""
        return Weights(change(self.matrix), None if self.bias is None else change(self.bias))


def make_linear(weights: Weights, dtype: torch.dtype, *, int8: bool = False) -> Linear:
    """The fastest linear layer for rows of `dtype` on the weights' device."""
    if int8 or (multiplies_fp16(weights.matrix.device, dtype) and fits_fp16(weights.matrix)):
        return FbgemmLinear(weights.matrix, weights.bias, int8=int8)
    weights = weights.each(lambda tensor: tensor.to(dtype))
    kind = PackedLinear if can_pack(weights.matrix.device, dtype) else PlainLinear
    return kind(weights.matrix, weights.bias)


def fastest_dtype(device: torch.device) -> str:
    """Dtype to compute 16-bit checkpoints in: bfloat16, or float16 on GPUs and float32 on CPUs that lack it."""
    if device.type == "cpu":
        return "bfloat16" if can_multiply_bfloat16() else "float32"
    lacks_it = torch.cuda.device_count() and torch.cuda.get_device_capability(device)[0] < _BFLOAT16_CAPABILITY
    return "float16" if lacks_it else "bfloat16"


def can_multiply_bfloat16() -> bool:
    """Whether oneDNN multiplies in bfloat16 on this CPU, with float32 sums."""
    has_onednn = torch._C._has_mkldnn  # noqa: SLF001 - its public name is untyped
    return has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001 - no public name


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed products exist for `dtype` on `device`."""
    is_product = dtype is torch.float32 or (dtype is torch.bfloat16 and can_multiply_bfloat16())
    return is_product and device.type == "cpu" and torch._C._has_mkldnn  # noqa: SLF001 - its public name is untyped


def multiplies_fp16(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `device` multiplies rows of `dtype` by float16 weights."""
    return dtype is torch.float32 and why_not_int8(device) is None


def fits_fp16(matrix: Tensor) -> bool:
    """Whether float16 holds a matrix to within 2^-25 (bfloat16 numbers from 2^-17 on exactly)."""
    if matrix.dtype is torch.bfloat16:  # has fewer digits than float16
        return bool(matrix.abs().max() <= torch.finfo(torch.float16).max)
    return bool(matrix.half().float().sub_(matrix).abs_().max() <= _LARGEST_FP16_ERROR)


def why_not_int8(device: torch.device) -> str | None:
    """Why FBGEMM cannot multiply in int8 and float16 on `device`; None: it can."""
    if device.type != "cpu":
        return f"not on {device}"
    engine = torch.backends.quantized.engine
    return None if engine in _ENGINES else f"torch multiplies them with {engine} here, allowed: {' or '.join(_ENGINES)}"


def largest_int8_weight() -> int:
    """Largest int8 weight whose products this CPU sums without overflow."""
    has_vnni = torch.cpu._is_vnni_supported()  # noqa: SLF001 - no public name
    return _LARGEST_INT8 if has_vnni else _LARGEST_WITHOUT_VNNI


class PlainLinear(Linear):
    """A `Linear` over the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, rows: Tensor) -> Tensor:
        """See `Linear`."""
        return F.linear(rows, self._weight, self._bias)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """See `Linear`."""
        if self._bias is not None:
            return super().add_to(residual, rows)
        if residual.is_cuda:
            return residual.addmm_(rows, self._weight.t())  # `addmm` would copy the residual first
        return torch.addmm(residual, rows, self._weight.t())


class PackedLinear(Linear):
    """A `Linear` over a copy of the weight in oneDNN's blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # Overloads, looked up once instead of in each call.
        product = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001 - no public name
        self._multiply: Callable[..., Tensor] = product.default
        self._multiply_add: Callable[..., Tensor] = product.binary
        pack = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001 - no public name
        self._weight = pack(weight.contiguous(), _PACKED_FOR_ROWS)
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        """See `Linear`."""
        return self._multiply(rows, self._weight, self._bias, "none", [], "")

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """See `Linear`; returns a new tensor, rounded once."""
        return self._multiply_add(rows, residual, self._weight, self._bias, "add")


class FbgemmLinear(Linear):
    """A `Linear` over a copy of the weight in float16 or int8; float32 in and out. In int8 all rows share a scale."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, int8: bool = False) -> None:
        quantized, bias, self._is_int8 = torch.ops.quantized, None if bias is None else bias.float(), int8
        if int8:
            self._weight = quantized.linear_prepack(_scaled_by_output(weight), bias)
            self._multiply = quantized.linear_dynamic.default._op  # noqa: SLF001 - no public name
        else:
            self._weight = quantized.linear_prepack_fp16(weight.float(), bias)
            self._multiply = quantized.linear_dynamic_fp16.default._op  # noqa: SLF001 - no public name

    def __call__(self, rows: Tensor) -> Tensor:
        """See `Linear`."""
        number = len(rows)
        missing = 0 if self._is_int8 else _num_uniform_rows(number) - number
        result: Tensor = self._multiply(F.pad(rows, (0, 0, 0, missing)) if missing else rows, self._weight)
        return result[:number] if missing else result


def _scaled_by_output(weight: Tensor) -> Tensor:
    """The int8 weight as torch's quantized tensor."""
    values, scales = to_int8(weight, largest_int8_weight())
    zeros = torch.zeros(len(scales), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantize.* deprecated", category=UserWarning)
        return torch._make_per_channel_quantized_tensor(values, scales.flatten().double(), zeros, 0)  # noqa: SLF001 - no public name


@cache
def _num_uniform_rows(least: int) -> int:
    """Least number of rows from `least` on at which equal rows give equal results. Raises `ConfigError`."""
    random = torch.Generator().manual_seed(0)
    weight, row = (torch.randn(number, 64, generator=random) for number in (32, 1))
    weight = torch.ops.quantized.linear_prepack_fp16(weight, None)
    for number in range(least, least + 64):
        results = torch.ops.quantized.linear_dynamic_fp16(row.repeat(number, 1), weight)
        if bool((results == results[0]).all()):
            return number
    raise ConfigError("float16 products of this CPU depend on the place of a row: set the model's dtype to bfloat16")


def to_int8(matrix: Tensor, largest: int = _LARGEST_INT8) -> tuple[Tensor, Tensor]:
    """[rows, columns] -> int8 of that shape, and float32 scales [rows, 1]; each row's largest becomes `largest`."""
    weights = matrix.detach().float()
    scales = weights.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / largest
    return (weights / scales).round().to(torch.int8), scales
