"""Streams whose work runs late: in order on each stream, among streams at random, as far as waits allow it."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

if TYPE_CHECKING:
    from fake_cuda.record import StreamId


class Mark:
    """A place in a stream."""

    is_reached = False

    def reach(self) -> None:
        self.is_reached = True


class _Entry(NamedTuple):
    work: Callable[[], object]
    behind: Mark | None


class LateStreams:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._haste = self._random.choice((0.0, 0.2, 0.5))  # 0: nothing runs before the host waits for it
        self._queues: defaultdict[StreamId, deque[_Entry]] = defaultdict(deque)

    def put(self, stream: StreamId, work: Callable[[], object], behind: Mark | None = None) -> None:
        self._queues[stream].append(_Entry(work, behind))
        while self._random.random() < self._haste and self._run_one():
            pass

    def mark(self, stream: StreamId) -> Mark:
        mark = Mark()
        self.put(stream, mark.reach)
        return mark

    def finish(self, *marks: Mark) -> None:
        while not all(mark.is_reached for mark in marks):
            assert self._run_one(), "streams wait for each other"

    def finish_all(self) -> None:
        self.finish(*map(self.mark, [*self._queues]))

    def _run_one(self) -> bool:
        heads = [queue for queue in self._queues.values() if queue and (queue[0].behind or _BEGINNING).is_reached]
        if heads:
            self._random.choice(heads).popleft().work()
        return bool(heads)


_BEGINNING = Mark()
_BEGINNING.reach()


def spoil(tensor: Tensor) -> Tensor:
    """Numbers that are no index and change every sum."""
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.fill_(torch.iinfo(tensor.dtype).max // 2 if is_integer else float("nan"))


def foreseen(call: Callable[..., object], args: object, kwargs: object, *, is_mutable: bool) -> object:
    """What `call` will return, without its values; views as they are."""
    leaves, spec = tree_flatten((args, kwargs))
    metas = {id(leaf): _without_values(leaf, "meta") for leaf in leaves if isinstance(leaf, Tensor)}
    known = {id(metas[id(leaf)]): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    meta_args, meta_kwargs = tree_unflatten([metas.get(id(leaf), leaf) for leaf in leaves], spec)
    results = call(*meta_args, **meta_kwargs)
    memory = {meta.untyped_storage()._cdata for meta in metas.values()}
    made = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
    if not is_mutable and made and all(tensor.untyped_storage()._cdata in memory for tensor in made):
        return call(*args, **kwargs)  # type: ignore[misc]  # a tuple and a dictionary

    def made_of(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        return known[id(leaf)] if id(leaf) in known else spoil(_without_values(leaf, "cpu"))

    return tree_map(made_of, results)


def _without_values(tensor: Tensor, device: str) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
