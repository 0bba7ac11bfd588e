"""Tensors that say they are on a GPU. Inside, each is one on the CPU, or on `meta`, where nothing is computed.

Operators reach `CudaTensor` through the dispatcher; `Bindings` (`bindings.py`) handles all other calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from fake_cuda.late import foreseen
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from typing_extensions import Self

from amusd.sampling.operators import Triton

if TYPE_CHECKING:
    from fake_cuda.gpus import FakeGpus

Direction: TypeAlias = Literal["in", "out", "across"]


class CudaTensor(Tensor):
    inner: Tensor
    devices: FakeGpus

    @staticmethod
    def __new__(cls, inner: Tensor, index: int, devices: FakeGpus) -> Self:
        wrapper = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("cuda", index),
        )
        wrapper.inner = inner
        wrapper.devices = devices
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"CudaTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.split("::")[-1], kwargs or {}
        if name == "copy_":
            return copy_to(*args, **kwargs)
        if name == "_to_copy":
            return move(args[0], copy=True, **{key: kwargs.get(key) for key in _TO_COPY})
        return run(name, func, args, kwargs, is_mutable=func._schema.is_mutable)


_TO_COPY = ("device", "dtype", "non_blocking", "memory_format")
_READS_ON_HOST = frozenset({"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose"})
_INDEXING = frozenset({"index", "index_put_", "__getitem__", "__setitem__"})
_SHAPE_DEPENDS_ON_DATA = frozenset({"nonzero", "masked_select", "_unique2", "unique_dim", "bincount"})


def run(name: str, call: Callable[..., Any], args: Any, kwargs: Any, *, is_mutable: bool) -> Any:
    """Run `call` on the inner tensors of the arguments; returns its results as tensors on the same device.

    Raises `RuntimeError` where arguments are on different devices, or the host would have to wait amid a capture.
    """
    leaves, spec = tree_flatten((args, kwargs))
    operands = [leaf for leaf in leaves if isinstance(leaf, CudaTensor)]
    devices, index = operands[0].devices, int(operands[0].device.index)
    waits = _wait_for_data(name, args, leaves, operands[0]) or name in _READS_ON_HOST
    if name in _READS_ON_HOST:
        devices.check_may_wait(name)
        devices.copied("out", index, operands[0].element_size(), nothing, waits=True)
        if operands[0].inner.is_meta:
            return torch.zeros((), dtype=operands[0].dtype).item()
    inner_args, inner_kwargs = tree_unflatten([_given(leaf) for leaf in leaves], spec)
    if Triton.is_used:
        call = devices.kernels.get(name, call)
    if devices.late is None or waits:
        results = call(*inner_args, **inner_kwargs)
    else:
        results = foreseen(call, inner_args, inner_kwargs, is_mutable=is_mutable)
    known = {id(operand.inner): operand for operand in operands}
    memory = {operand.inner.untyped_storage()._cdata for operand in operands}
    made = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
    is_view = all(tensor.untyped_storage()._cdata in memory for tensor in made) and not is_mutable
    if not is_mutable:
        devices.allocated(tensor for tensor in made if tensor.untyped_storage()._cdata not in memory)
    if not is_view and not name.startswith(("empty", "new_empty")):

        def repeat() -> None:
            again = tree_leaves(call(*inner_args, **inner_kwargs))
            for old, new in zip(made, [leaf for leaf in again if isinstance(leaf, Tensor)], strict=True):
                if old is not new:
                    old.copy_(new)

        devices.launched(name, index, operands, nothing if operands[0].inner.is_meta or waits else repeat)

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return known[id(leaf)] if id(leaf) in known else CudaTensor(leaf, index, devices)

    return tree_map(wrap, results)


def move(
    source: Tensor,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    non_blocking: bool | None = False,
    memory_format: torch.memory_format | None = None,
    copy: bool = False,
) -> Tensor:
    target = source.device if device is None else device
    form = {} if memory_format is None else {"memory_format": memory_format}
    if isinstance(source, CudaTensor):
        index = source.devices.index_of(target) if target.type == "cuda" else None
        if index != source.device.index:
            return _leave(source, index, dtype, pin=bool(non_blocking))
        same = dtype in (None, source.dtype) and (
            memory_format is None or source.is_contiguous(memory_format=memory_format)
        )
        if same and not copy:
            return source
        kwargs = {"dtype": dtype or source.dtype, **form}
        return run("_to_copy", torch.ops.aten._to_copy.default, (source,), kwargs, is_mutable=False)
    raise AssertionError("tensors on the host are moved by `Bindings`")


def _leave(source: CudaTensor, index: int | None, dtype: torch.dtype | None, *, pin: bool) -> Tensor:
    devices = source.devices
    if dtype not in (None, source.dtype):
        source = run("_to_copy", torch.ops.aten._to_copy.default, (source,), {"dtype": dtype}, is_mutable=False)
    inner = torch.empty_like(source.inner) if index is not None else torch.zeros(source.shape, dtype=source.dtype)
    target = inner if index is None else CudaTensor(inner, index, devices)
    return copy_to(devices.pin(target) if pin and index is None else target, source, non_blocking=pin)


def arrive(source: Tensor, index: int, devices: FakeGpus, dtype: torch.dtype | None, *, non_blocking: bool) -> Tensor:
    inner = torch.empty(source.shape, dtype=dtype or source.dtype, device=devices.inner_device)
    return copy_to(CudaTensor(inner, index, devices), source, non_blocking=non_blocking)


def copy_to(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    here, there = (isinstance(tensor, CudaTensor) for tensor in (target, source))
    if here and there and target.device == source.device:
        return run("copy_", Tensor.copy_, (target, source), {}, is_mutable=True)
    own, host = (source, target) if there else (target, source)
    direction: Direction = "across" if here and there else "out" if there else "in"
    waits = direction != "across" and not (non_blocking and own.devices.is_pinned(host))
    inner_target, inner_source = inner_of(target), inner_of(source)

    def repeat() -> None:
        if not inner_source.is_meta:
            inner_target.copy_(inner_source)
        elif not inner_target.is_meta:
            inner_target.zero_()

    if waits:
        own.devices.check_may_wait("a copy that the host waits for")
    if own.devices.late is None:
        repeat()
        if direction == "in" and not waits and not inner_target.is_meta:
            own.devices.reads(host)
    own.devices.copied(direction, own.device.index, source.nbytes, repeat, waits=waits)
    return target


def _wait_for_data(name: str, args: Any, leaves: list[Any], operand: CudaTensor) -> bool:
    """True if a shape depends on data. Records this hidden wait, and that for indices on the host. Raises as `run`."""
    devices, index = operand.devices, int(operand.device.index)
    indices = tree_leaves(args[1]) if name in _INDEXING else []
    depends = name in _SHAPE_DEPENDS_ON_DATA or any(_is_mask(leaf) for leaf in indices)
    if depends:
        devices.check_may_wait(name)
        devices.copied("out", index, torch.int64.itemsize, nothing, waits=True)
    for tensor in leaves:
        if isinstance(tensor, Tensor) and tensor.device != operand.device and tensor.dim():
            if all(tensor is not leaf for leaf in indices):
                raise RuntimeError(f"{name}: tensors on {operand.device} and {tensor.device}")
            devices.check_may_wait(name)
            devices.copied("in", index, tensor.nbytes, nothing, waits=True)
    return depends


def _is_mask(leaf: Any) -> bool:
    return isinstance(leaf, CudaTensor) and leaf.dtype == torch.bool


def inner_of(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, CudaTensor) else leaf


def _given(leaf: Any) -> Any:
    """The argument as a kernel gets it: numbers on the host as they are when it is launched."""
    return leaf.clone() if isinstance(leaf, Tensor) and not isinstance(leaf, CudaTensor) else inner_of(leaf)


def nothing() -> None:
    pass
