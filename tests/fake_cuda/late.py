"""Streams whose work runs late: in order on each stream, among streams at random, as far as waits allow it."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from threading import Event
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from fake_cuda.record import StreamId

_REACHED = Event()
_REACHED.set()


class LateStreams:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._haste = self._random.choice((0.0, 0.2, 0.5))  # 0: nothing runs before the host waits for it
        self._queues: defaultdict[StreamId, deque[tuple[Callable[[], object], Event]]] = defaultdict(deque)

    def put(self, stream: StreamId, work: Callable[[], object], after: Event = _REACHED) -> None:
        self._queues[stream].append((work, after))
        while self._random.random() < self._haste and self._run_one():
            pass

    def mark(self, stream: StreamId) -> Event:
        """An event that is set once the stream has come to this place."""
        mark = Event()
        self.put(stream, mark.set)
        return mark

    def finish(self, *marks: Event) -> None:
        while not all(mark.is_set() for mark in marks):
            assert self._run_one(), "streams wait for each other"

    def finish_all(self) -> None:
        self.finish(*map(self.mark, [*self._queues]))

    def _run_one(self) -> bool:
        heads = [queue for queue in self._queues.values() if queue and queue[0][1].is_set()]
        if heads:
            self._random.choice(heads).popleft()[0]()
        return bool(heads)


def spoil(tensor: Tensor) -> Tensor:
    """Fill with numbers that are no index and change every sum."""
    is_real = tensor.is_floating_point() or tensor.is_complex()
    return tensor.fill_(float("nan") if is_real else tensor.dtype == torch.bool or torch.iinfo(tensor.dtype).max // 2)


def foreseen(call: Callable[..., object], args: object, kwargs: object, *, is_mutable: bool) -> object:
    """The result that `call` will return, without its values; views as they are."""
    given = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    metas = {key: _without_values(leaf, "meta") for key, leaf in given.items()}
    known = {id(meta): given[key] for key, meta in metas.items()}
    meta_args, meta_kwargs = tree_map(lambda leaf: metas.get(id(leaf), leaf), (args, kwargs))
    results = call(*meta_args, **meta_kwargs)
    memory = {meta.untyped_storage()._cdata for meta in metas.values()}
    made = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
    if not is_mutable and made and all(tensor.untyped_storage()._cdata in memory for tensor in made):
        return call(*args, **kwargs)  # type: ignore[misc]  # a tuple and a dictionary
    new = {id(leaf): spoil(_without_values(leaf, "cpu")) for leaf in made if id(leaf) not in known}
    return tree_map(lambda leaf: {**known, **new}.get(id(leaf), leaf), results)


def _without_values(tensor: Tensor, device: str) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
