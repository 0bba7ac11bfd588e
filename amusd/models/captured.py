"""Passes of a few fixed shapes over one cache, captured once and replayed: how a GPU is kept fed.

A replay needs no Python per operator. Everything that changes from pass to pass is data on the device: the tokens, how
many of them are real, and the position of the first. So a rollback changes one number, and several draft steps fit in
one replay, each reading the token that the one before it chose. Token ids leave through pinned memory; the host waits
for one event per replay and never asks the device for a value.

`capture` is what makes it a CUDA graph; `run_each_time` does the same work on any device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from amusd.errors import DeviceError
from amusd.models.kv_cache import PreallocatedCache
from amusd.models.network import Network

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Turns work on fixed addresses into something that repeats it."""

DEVICE_SECONDS = 60.0
"""Longest that one replay may take before the device counts as lost."""

_WARM_UP_RUNS = 2  # kernels are chosen, and memory is allocated, in the first runs
_NUM_SCALARS = 2  # before the tokens in the input buffer: position of the first, number of real ones


class _Event(Protocol):
    """What is used of `torch.cuda.Event`."""

    def record(self) -> None: ...

    def query(self) -> bool: ...


def run_each_time(work: Callable[[], None]) -> Replay:
    """No capture: the work itself, for devices that cannot replay and for tests."""
    return work


def capture_cuda_graph(work: Callable[[], None]) -> Replay:
    """`work` as a CUDA graph. It runs here two times, with the inputs as they are."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch is untyped here
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP_RUNS):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


class CapturedPasses:
    """Runs a network over one cache in captured passes.

    A pass is known by its shape: rows computed, keys read, and how many tokens are chosen one after another (`steps`).
    """

    def __init__(
        self,
        network: Network,
        cache: PreallocatedCache,
        *,
        max_length: int,
        max_rows: int,
        max_steps: int,
        output_ids: Tensor | None,
        capture: Capture,
    ) -> None:
        """`max_length`: positions that the model knows; `output_ids`: see `LanguageModel`."""
        self._network = network
        self._cache = cache
        self._last_position = max_length - 1
        self._max_rows = max_rows
        self._output_ids = output_ids
        self._capture = capture
        self._replays: dict[tuple[int, int, int], tuple[Replay, list[Tensor]]] = {}
        device = network.device
        on_gpu = device.type == "cuda"
        self._host_inputs = torch.zeros(_NUM_SCALARS + max_rows, dtype=torch.int64, pin_memory=on_gpu)
        self._host_outputs = torch.zeros(max_rows + max_steps, dtype=torch.int64, pin_memory=on_gpu)
        self._host_inputs_view = self._host_inputs.numpy()
        self._inputs = torch.zeros_like(self._host_inputs, device=device)
        self._outputs = torch.zeros_like(self._host_outputs, device=device)
        self._indices = torch.arange(cache.allocated, device=device)
        self._done: _Event | None = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]  # torch's

    def choose(self, token_ids: Sequence[int], rows: int, num_keys: int) -> list[int]:
        """The most likely token after each of `token_ids`, which are padded to `rows`. The cache moves on."""
        self._replay(token_ids, rows, num_keys, 1)
        chosen: list[int] = self._host_outputs[: len(token_ids)].tolist()
        self._cache.advance(len(token_ids))
        return chosen

    def extend(self, token_ids: Sequence[int], rows: int, num_keys: int, steps: int) -> list[int]:
        """The `steps` most likely tokens after `token_ids`, each following the one before. The last stays outside."""
        self._replay(token_ids, rows, num_keys, steps)
        count = len(token_ids)
        outputs: list[int] = self._host_outputs.tolist()
        self._cache.advance(count + steps - 1)
        return [outputs[count - 1], *outputs[self._max_rows + 1 : self._max_rows + steps]]

    def forward(self, token_ids: Sequence[int], rows: int, num_keys: int) -> Tensor:
        """Logits [len(token_ids), vocab], valid until the next pass."""
        logits = self._replay(token_ids, rows, num_keys, 1)
        self._cache.advance(len(token_ids))
        return logits[: len(token_ids)]

    def prepare(self, rows: int, num_keys: int, steps: int) -> None:
        """Capture this shape now. Whatever the cache held is overwritten."""
        self._send([0] * rows)
        self._captured(rows, num_keys, steps)

    def _replay(self, token_ids: Sequence[int], rows: int, num_keys: int, steps: int) -> Tensor:
        self._send(token_ids)
        replay, logits = self._captured(rows, num_keys, steps)
        with torch.inference_mode():
            replay()
        self._wait()
        return logits[0]

    def _send(self, token_ids: Sequence[int]) -> None:
        # The last replay is over (`_wait`), so nothing reads the buffer any more.
        count = len(token_ids)
        self._host_inputs_view[: _NUM_SCALARS + count] = (self._cache.length, count, *token_ids)
        self._inputs.copy_(self._host_inputs, non_blocking=True)

    def _captured(self, rows: int, num_keys: int, steps: int) -> tuple[Replay, list[Tensor]]:
        key = (rows, num_keys, steps)
        known = self._replays.get(key)
        if known is None:
            logits: list[Tensor] = []

            def work() -> None:
                logits[:] = [self._pass(rows, num_keys, steps)]

            with torch.inference_mode():
                known = self._replays[key] = (self._capture(work), logits)
        return known

    def _pass(self, rows: int, num_keys: int, steps: int) -> Tensor:
        """The work of one replay: `rows` rows, then `steps - 1` single ones; the logits of the first part."""
        start, count = self._inputs[0], self._inputs[1]
        token_ids = self._inputs[_NUM_SCALARS : _NUM_SCALARS + rows]
        logits = self._compute(token_ids, start + self._indices[:rows], num_keys)
        chosen = self._choose(logits)
        self._outputs[:rows] = chosen
        last = chosen.index_select(0, (count - 1).unsqueeze(0))  # [1]
        for step in range(1, steps):
            slot = (start + count + (step - 1)).unsqueeze(0)
            last = self._choose(self._compute(last, slot, num_keys))
            self._outputs[self._max_rows + step : self._max_rows + step + 1] = last
        self._host_outputs.copy_(self._outputs, non_blocking=True)
        return logits

    def _compute(self, token_ids: Tensor, slots: Tensor, num_keys: int) -> Tensor:
        rows = len(token_ids)
        visible = self._indices[:num_keys] <= slots.unsqueeze(1)  # [rows, num_keys]
        mask = torch.zeros_like(visible, dtype=self._network.cache_dtype).masked_fill_(~visible, -torch.inf)
        mask = mask.expand(1, self._network.num_query_groups, -1, -1).contiguous()
        self._cache.begin(rows, num_keys, slots)
        positions = slots.clamp(max=self._last_position)
        logits = self._network(token_ids, positions, mask, self._cache, with_logits=True)
        assert logits is not None
        return logits

    def _choose(self, logits: Tensor) -> Tensor:
        columns = logits.argmax(dim=-1)
        return columns if self._output_ids is None else self._output_ids[columns]

    def _wait(self) -> None:
        """Until the outputs are on the host. Raises `DeviceError` after `DEVICE_SECONDS`."""
        if self._done is None:
            return
        self._done.record()
        deadline = time.monotonic() + DEVICE_SECONDS
        while not self._done.query():
            if time.monotonic() > deadline:
                raise DeviceError(f"the device did not finish a pass within {DEVICE_SECONDS:g} seconds")
