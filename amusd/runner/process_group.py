"""A torch process group for the ranks of one model, and a watch for lost ranks.

The backend is NCCL if each rank has its own GPU, else gloo. The group carries only tensors, neither encrypted nor
authenticated.

gloo: an exchange blocks the host, and raises when another rank's process is gone, or after `EXCHANGE_SECONDS`.

NCCL: an exchange is put on the current stream. If another rank is gone, the exchange's kernel spins, and the host may
block in any call that needs the device. So a thread watches the links and aborts the group. torch holds a lock during
an abort, and each exchange takes that lock, so no exchange may begin once a rank is lost. In CUDA graphs:

- All ranks capture the same exchanges in the same order, and replay the same graph.
- The first exchange, before any capture, makes the communicator.
- The capture mode is `thread_local`, since torch's watchdog thread queries events meanwhile.
- `abort` returns only when every graph with an exchange has been destroyed.

References:
    NCCL with CUDA graphs: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/cudagraph.html
    Abort waits for graphs: https://github.com/pytorch/pytorch/issues/115388 (`commDestroySync` in NCCL's init.cc)
    The watchdog and captures: https://github.com/pytorch/pytorch/pull/102542,
    https://github.com/pytorch/pytorch/pull/148594
    All ranks get the same sum: https://github.com/NVIDIA/nccl/issues/855
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from amusd.errors import RankLostError, first_line
from amusd.models.sharding import Ranks, share
from amusd.transport.torch_distributed import Backend, break_gloo, file_store, gloo_group, nccl_group

if TYPE_CHECKING:
    from amusd.transport.zeromq import ZeroMQTransport

EXCHANGE_SECONDS = 60.0
MANY_ROWS = 128
"""With this many rows, as in prompts, each rank sums a share of the rows: two exchanges with fewer bytes."""
_WATCHDOG_SECONDS = 2 * EXCHANGE_SECONDS  # NCCL: after our own deadline, whose error says more
WATCH_SECONDS = 0.05
ABORT_SECONDS = 2.0
"""Longest wait for an abort, since NCCL waits for graphs to be destroyed."""
_BEGUN_SECONDS = 0.1  # time for a begun exchange to reach the device
_NCCL_HINT = "NCCL_DEBUG=INFO says more; try NCCL_P2P_DISABLE=1, or name the network in NCCL_SOCKET_IFNAME"


def backend_for(devices: Sequence[str], *, same_machine: bool = True) -> Backend:
    """NCCL if each rank has its own GPU, as NCCL demands; else gloo."""
    on_gpus = all(device.startswith("cuda") for device in devices)
    return "nccl" if on_gpus and (len(set(devices)) == len(devices) or not same_machine) else "gloo"


class ProcessGroup(Ranks):
    """One rank of a group that exchanges tensors. Links to the other ranks show their loss."""

    def __init__(
        self, rank: int, size: int, folder: str, backend: Backend = "gloo", host: str = "127.0.0.1", store: Any = None
    ) -> None:
        """`folder`: where the ranks meet if there is no `store` of torch; `host`: this machine, for gloo."""
        super().__init__(rank, size)
        from torch.distributed import distributed_c10d as c10d

        self.captures = backend == "nccl"
        self._folder, self._host, self._store = folder, host, store
        self._backend = backend
        self._group: Any = None
        self._links: dict[int, ZeroMQTransport] = {}
        self._using = threading.Lock()
        """Held by the thread that uses a link: the rank's or the watch's."""
        self._is_lost = False  # another rank is lost: no further result may be used
        self._is_over = threading.Event()
        # A daemon, since nothing can end an abort that waits for a graph.
        self._watch = threading.Thread(target=self._watch_others, name="amusd-rank-watch", daemon=True)
        self._options = c10d.AllgatherOptions()  # type: ignore[attr-defined]  # missing in its __all__
        self._row_options = c10d.AllToAllOptions()
        self._options.asyncOp = self._row_options.asyncOp = False  # NCCL: on the current stream, and returns no work

    def form(self, device: str) -> None:
        """Form the group with the other ranks. Raises `RankLostError` for a lost rank, or after `EXCHANGE_SECONDS`."""
        self._watch.start()
        failures = [f"not within {EXCHANGE_SECONDS:g} s"]
        # A thread of its own, since nothing ends the forming of a communicator that waits for a rank.
        first = torch.zeros(self.size, device=device), torch.zeros(1, device=device)
        forming = threading.Thread(target=self._form, args=(*first, failures), name="amusd-rank-form", daemon=True)
        forming.start()
        deadline = time.monotonic() + EXCHANGE_SECONDS
        while forming.is_alive() and time.monotonic() < deadline:
            self.check()
            forming.join(WATCH_SECONDS)
        if failures:
            hint = f"; {_NCCL_HINT}" if self._backend == "nccl" else ""
            raise self._reason(RankLostError(f"the ranks of the target did not meet: {failures[-1]}{hint}"))

    def _form(self, parts: Tensor, part: Tensor, failures: list[str]) -> None:
        """Make the group and a first exchange, with which NCCL makes its communicator; success clears `failures`."""
        try:
            self._group = self._make(str(part.device))
            work = self._group._allgather_base(parts, part, type(self._options)())  # noqa: SLF001 - as in `gather`
            work.wait(timedelta(seconds=EXCHANGE_SECONDS))  # a timeout makes `wait` block the host
            failures.clear()
        except Exception as error:  # noqa: BLE001 - `form` raises it
            failures.append(first_line(error))

    def _make(self, device: str) -> Any:
        store = file_store(Path(self._folder), self.size) if self._store is None else self._store
        if self._backend == "nccl":
            options = distributed.ProcessGroupNCCL.Options()
            return nccl_group(store, self.rank, self.size, device, options, _WATCHDOG_SECONDS)
        return gloo_group(store, self.rank, self.size, EXCHANGE_SECONDS, self._host)

    def gather(self, part: Tensor) -> Tensor:
        """[size, *part.shape]: every rank's part in rank order, all of one shape and dtype.

        Raises `PeerError` when another rank is gone or silent, over NCCL only if already known.
        """
        part = part.contiguous()
        parts = part.new_empty((self.size * len(part), *part.shape[1:]))
        self._exchange(self._group._allgather_base, parts, part, self._options)  # noqa: SLF001 - no public name
        return parts.view(self.size, *part.shape)

    def own_rows(self, num_rows: int) -> slice:
        """See `Ranks`."""
        own = share(num_rows, self)
        return slice(own.start, own.stop) if num_rows >= MANY_ROWS else slice(None)

    def parts(self, part: Tensor) -> Tensor:
        """See `Ranks`. Raises as `gather`.

        Sums by NCCL would make a row's bits depend on the row's place in the message.
        """
        if len(part) < MANY_ROWS:
            return self.gather(part)
        sizes = self._num_own_rows(len(part))
        received = self._all_to_all(part, sizes, [sizes[self.rank]] * self.size)
        return received.view(self.size, -1, *part.shape[1:])

    def whole(self, own: Tensor, num_rows: int) -> Tensor:
        """See `Ranks`. Raises as `gather`."""
        if num_rows < MANY_ROWS:
            return own
        return self._all_to_all(own.repeat(self.size, 1), [len(own)] * self.size, self._num_own_rows(num_rows))

    def join(self, part: Tensor) -> Tensor:
        """See `Ranks`. Raises as `gather`."""
        return self.gather(part).transpose(0, 1).flatten(1)  # [rows, size, n] is copied

    def check(self) -> None:
        """See `Ranks`."""
        if self._is_over.is_set():
            raise RankLostError("the ranks of the target are out of step after a failed pass: start the target anew")
        if self._is_lost:
            raise self._reason(RankLostError(f"{'rank 0' if self.rank else 'a rank'} of the target is gone"))

    def abort(self) -> None:
        """See `Ranks`. Waits up to `ABORT_SECONDS` for the abort. Idempotent."""
        if self._watch.ident is None:
            return
        self._is_over.set()
        self._watch.join(ABORT_SECONDS)
        if self._watch.is_alive():  # the thread ends with the graphs, and must not outlive the interpreter
            atexit.register(self._watch.join, ABORT_SECONDS)

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self.abort()
        with self._using:
            for link in self._links.values():
                link.close()

    def _reason(self, error: RankLostError) -> Exception:
        """The error to raise for the loss of another rank; `error` where no more is known."""
        return error

    def _watch_others(self) -> None:
        while not (self._is_lost or self._is_over.wait(WATCH_SECONDS)):
            with self._using:
                self._is_lost = any(link.is_lost for link in self._links.values())
        self._is_over.wait(_BEGUN_SECONDS)
        self._abort_group()

    def _abort_group(self) -> None:
        """End this rank's exchanges. Over NCCL this may wait for ever for graphs to be destroyed."""
        with suppress(RuntimeError):  # NCCL: the abort was done before, or failed; nothing more can be done
            if self._group is None:
                return
            if self._backend == "nccl":
                self._group.abort()
            else:  # gloo's own `abort` ends no wait
                break_gloo(self._group, (self.rank + 1) % self.size)

    def _num_own_rows(self, num_rows: int) -> list[int]:
        return [len(share(num_rows, Ranks(rank, self.size))) for rank in range(self.size)]

    def _all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """The rows that this rank receives, in rank order; `sent`: number of rows for each rank."""
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        self._exchange(self._group.alltoall_base, result, rows.contiguous(), received, sent, self._row_options)
        return result

    def _exchange(self, begin: Callable[..., Any], *given: Any) -> None:
        """Exchange tensors. Raises the reason if a rank is lost or the exchange fails."""
        self.check()
        try:
            work = begin(*given)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            lost = RankLostError(f"the ranks of the target have lost each other: {first_line(error)}")
            raise self._reason(lost) from None
