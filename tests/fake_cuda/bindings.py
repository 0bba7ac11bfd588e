"""Stand-ins for Python functions of torch that would look for a GPU.

These are functions that make tensors on a device, moves between devices, and the methods whose bindings hold a device
guard, which builds of torch without CUDA lack.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from fake_cuda.gpus import FakeGpus
from fake_cuda.late import spoil
from fake_cuda.tensors import CudaTensor, arrive, copy_to, inner_of, move, run
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class Bindings(TorchFunctionMode):
    def __init__(self, devices: FakeGpus) -> None:
        super().__init__()
        self._devices = devices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        own = args[0] if args and isinstance(args[0], CudaTensor) else None
        if func in _MOVES and isinstance(args[0], Tensor):
            return self._move(func, *args, **kwargs)
        if func in (Tensor.pin_memory, Tensor.is_pinned) and own is None:
            return self._devices.pin(args[0].clone()) if func is Tensor.pin_memory else self._devices.is_pinned(args[0])
        if kwargs.get("pin_memory"):
            return self._devices.pin(func(*args, **{**kwargs, "pin_memory": False}))
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            return self._make(func, args, kwargs)
        if own is not None and func is F.scaled_dot_product_attention and _is_causal_bias(*args, **kwargs):
            return _attend_causally(*args, **kwargs)
        if own is not None and func in _GUARDED:
            return self._guarded(func, own, args, kwargs)
        return func(*args, **kwargs)

    def _make(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        index = self._devices.index_of(torch.device(kwargs.pop("device")))
        kwargs.pop("pin_memory", None)
        if func in (torch.tensor, torch.as_tensor, torch.asarray):
            return arrive(func(*args, **kwargs), index, self._devices, None, non_blocking=False)
        args, kwargs = tree_map(inner_of, (args, kwargs))
        inner = func(*args, **kwargs, device=self._devices.inner_device)
        if not func.__name__.startswith(("empty", "new_empty")):
            refill = lambda: inner.copy_(func(*args, **kwargs, device=self._devices.inner_device))  # noqa: E731
            if self._devices.late is not None:
                spoil(inner)
            self._devices.launched(func.__name__, index, [], refill)
        return CudaTensor(inner, index, self._devices)

    def _move(self, func: Any, source: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = {key: value for key, value in kwargs.items() if key != "copy"}
        wanted = ("cpu",) if func is Tensor.cpu else args
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*wanted, **given)
        if isinstance(source, CudaTensor):
            return move(
                source,
                device=device,
                dtype=dtype,
                non_blocking=non_blocking,
                memory_format=memory_format,
                copy=kwargs.get("copy", False),
            )
        if device is None or device.type != "cuda":
            return func(source, *args, **kwargs)
        return arrive(source, self._devices.index_of(device), self._devices, dtype, non_blocking=non_blocking)

    def _guarded(self, func: Any, own: CudaTensor, args: Any, kwargs: Any) -> Any:
        if func is Tensor.copy_:
            return copy_to(*args, **kwargs)
        if func in _READS:
            host = move(own, device=torch.device("cpu"))
            return func(host, *args[1:], **kwargs)
        if func is Tensor.numpy:
            raise TypeError("can't convert a tensor on a GPU to numpy; copy it to the host first")
        if func is Tensor.__setitem__ and isinstance(args[2], Tensor) and args[2].device != own.device:
            return copy_to(run("__getitem__", Tensor.__getitem__, args[:2], {}, is_mutable=False), args[2])
        return run(func.__name__, func, args, kwargs, is_mutable=func is Tensor.__setitem__)


def _is_causal_bias(*args: Any, attn_mask: Any = None, **_kwargs: Any) -> bool:
    return isinstance(args[3] if len(args) > 3 else attn_mask, CausalBias)


def _attend_causally(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: CausalBias, *args: Any, **kwargs: Any
) -> Any:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = attn_mask._materialize(query.device)
        return F.scaled_dot_product_attention(query, key, value, mask, *args, **kwargs)

    return run("scaled_dot_product_attention", attend, (query, key, value), {}, is_mutable=False)


_MOVES = frozenset({Tensor.to, Tensor.cpu})
_READS = frozenset({Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__})
_GUARDED = _READS | {
    Tensor.__getitem__,
    Tensor.__setitem__,
    Tensor.__invert__,
    Tensor.contiguous,
    Tensor.copy_,
    Tensor.nonzero,
    Tensor.numpy,
}
