"""`fake_cuda()`: run the project's own code on fake GPUs, in a build of torch without CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from fake_cuda.bindings import Bindings
from fake_cuda.gpus import FakeGpus
from fake_cuda.late import LateStreams
from fake_cuda.streams import doubles
from typing_extensions import Self

from amusd.models.fused import add_and_norm, rotate_and_store, silu_and_multiply
from amusd.models.row_attention import attend_rows
from amusd.sampling.noise import noisy_scores

# What these operators give on `meta`, where nothing is computed
attend_rows.register_fake(lambda query, *_: query.new_empty(query.shape))
silu_and_multiply.register_fake(lambda gate_up: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)))
add_and_norm.register_fake(lambda hidden, *_: torch.empty_like(hidden))
rotate_and_store.register_fake(
    lambda joint, _rotation, _norm, storage, _slots, num_queries, _epsilon: storage.new_empty(
        (len(joint), num_queries, joint.shape[2])
    )
)
noisy_scores.register_fake(lambda logits, *_: torch.empty_like(logits, dtype=torch.float32))


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Self:
        wanted = torch.device(device)
        return super().__new__(cls, "cpu" if wanted.type == "cuda" else wanted)


@contextmanager
def fake_cuda(*, values: bool = False, seed: int | None = None) -> Iterator[FakeGpus]:
    """Inside, this thread can use `cuda:0` and `cuda:1`, and their work is recorded.

    `values`: compute on the CPU, so that replays of graphs do what real ones would (for small models). Otherwise only
    shapes and dtypes are known: a model takes no memory, and whatever comes to the host is 0. `seed`: streams run late,
    in an order of this seed; None: all work is done at once.
    """
    gpus = FakeGpus(2, "cpu" if values else "meta", None if seed is None else LateStreams(seed))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **doubles(gpus)))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())  # operators reach the tensors whole
        views = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)  # which wrappers cannot be
        stack.enter_context(torch._C._ExcludeDispatchKeyGuard(views))
        stack.enter_context(Bindings(gpus))
        yield gpus
