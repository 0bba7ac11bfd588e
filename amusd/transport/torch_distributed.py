"""A link over `torch.distributed` between two processes of one machine: gloo, or gloo with long frames by NCCL.

* The ends meet by a file store in a private folder, so no stranger can connect. Gloo listens on loopback.
* A frame follows its length (uint32, little-endian) in a block of `BLOCK_BYTES`. A longer frame follows the block as a
  body, whose size the receiver then knows. With `nccl` bodies go from device to device. A posted receive is a kernel
  that spins on the device, so it is posted only after the block has come.
* Gloo has no polling receive, and a send ends only when the peer receives. So a thread sends and another receives; the
  methods use bounded queues, and never wait for the peer.
* A closing peer sends a goodbye; a dying process ends its connections. A stopped process is slow, not lost.
* `close` may leave a thread behind that forms groups (`FORM_SECONDS`), or that sends to a peer that has closed.
"""

from __future__ import annotations

import os
import queue
import struct
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch import distributed

from amusd.errors import ConfigError, PeerLostError, PeerProtocolError, first_line
from amusd.logs import logger
from amusd.protocol.wire import MAX_FRAME_BYTES
from amusd.transport.base import CLOSED, CLOSED_BY_PEER, MAX_QUEUED_MESSAGES, Transport

Backend: TypeAlias = Literal["gloo", "nccl"]

BLOCK_BYTES = 4096
"""Holds all frames but prompts, features, long errors and draft probs."""
CLOSE_SECONDS = 2.0
"""How long `close` waits for the last messages to leave."""
FORM_SECONDS = 30.0
DEVICE_BODY_SECONDS = 10.0

NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
}
"""Environment variables that torch's NCCL groups read when made, for links and ranks.

TORCH_NCCL_ASYNC_ERROR_HANDLING=2: a dead or late peer ends the transfer, not the process as with 1 (torchrun's). The
others prevent threads that poll the ranks' file, which is gone, or write traces to /tmp.
"""

MAX_WAITING = 16
"""`has_room` is False while this many frames wait to be sent."""

_LENGTH = struct.Struct("<I")
_GOODBYE = 0xFFFFFFFF
_BLOCK_TAG, _BODY_TAG = range(2)
_NO_TAG = 2**16  # no message has it
_FOREVER = timedelta(days=365)
_MEET_SECONDS = 0.01  # between two looks for the peer
_JOIN_SECONDS = 1.0  # how long a thread may take to end after its waits are interrupted
_c10d: Any = distributed  # its type stubs lack most names that are used here


@dataclass(frozen=True)
class Bodies:
    """How bodies travel in one direction: a group of two, its device and a time limit."""

    group: Any
    patience: timedelta = _FOREVER
    device: str = "cpu"
    on_stream: Callable[[], AbstractContextManager[Any]] = nullcontext

    def send(self, payload: bytes, peer: int) -> None:
        """Send a body. Raises RuntimeError."""
        with self.on_stream():
            tensor = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self.device)
            self.group.send([tensor], peer, _BODY_TAG).wait(self.patience)

    def receive(self, num_bytes: int, peer: int) -> bytes:
        """Receive a body of `num_bytes`. Raises RuntimeError."""
        with self.on_stream():
            tensor = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            self.group.recv([tensor], peer, _BODY_TAG).wait(self.patience)
            return tensor.cpu().numpy().tobytes()


class TorchDistributedTransport(Transport):
    """A `Transport` to another process. Neither end waits for the other."""

    def __init__(self, address: str, nonce: int | None, device: str, rank: int) -> None:
        """`address`: `gloo://` or `nccl://` and a private folder. `rank`: 0 for the listening end."""
        super().__init__(address, nonce)
        self._backend, _, folder = address.partition("://")
        self._folder = Path(folder)
        self._device = device
        self._rank, self._peer = rank, 1 - rank
        self._outbox: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED_MESSAGES)
        self._inbox: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED_MESSAGES)
        """Both queues end with a None."""
        self._loss: str | None = None
        self._blocks: Any = None
        """Gloo's group, once the peer has come."""
        self._bodies: dict[int, Bodies] = {}
        """Bodies by the sender's rank."""
        self._is_closing = False
        self._sender = threading.Thread(target=self._run_sender, name=f"{self._backend}-send", daemon=True)
        self._reader = threading.Thread(target=self._run_reader, name=f"{self._backend}-receive", daemon=True)
        self._sender.start()

    def send_frame(self, frame: bytes) -> None:
        """See `Transport`."""
        if self._loss is not None:
            raise PeerLostError(self._loss)
        try:
            self._outbox.put_nowait(frame)
        except queue.Full:
            raise PeerLostError(f"the peer stopped reading: {MAX_QUEUED_MESSAGES} messages wait for it") from None

    def has_room(self, num_bytes: int) -> bool:  # noqa: ARG002 - messages are counted, not bytes
        """See `Transport`."""
        return self._outbox.qsize() < MAX_WAITING

    def receive_frame(self, timeout: float) -> bytes | None:
        """See `Transport`."""
        if self._is_closing:
            raise PeerLostError(CLOSED)
        try:
            frame = self._inbox.get(timeout > 0, timeout)
        except queue.Empty:
            return None
        if frame is None:
            self._inbox.put(None)  # for the next call
            raise PeerLostError(self._loss)
        return frame

    def close(self) -> None:
        """See `Link`. Takes `CLOSE_SECONDS` and twice `_JOIN_SECONDS` at most."""
        if self._is_closing:
            return
        self._is_closing = True
        self._end_sending(CLOSED)
        self._sender.join(CLOSE_SECONDS)
        self._interrupt()
        with suppress(queue.Empty):
            while True:  # the reader may wait for room
                self._inbox.get_nowait()
        for thread in (self._sender, self._reader):
            if thread.is_alive():
                thread.join(_JOIN_SECONDS)

    def _end_sending(self, reason: str) -> None:
        self._loss = self._loss or reason
        with suppress(queue.Full):  # full: the sender needs no wake-up
            self._outbox.put_nowait(None)

    def _run_sender(self) -> None:
        """Form the groups, then send the outbox."""
        try:
            self._form_groups()
            self._reader.start()
            while (frame := self._outbox.get()) is not None:
                self._write(frame)
            if self._is_closing:
                self._send_block(_GOODBYE, patience=timedelta(seconds=CLOSE_SECONDS))
        except Exception as error:  # noqa: BLE001 - whatever it is, the link is lost
            logger.debug("lost the peer: %s", error)
            if self._reader.ident is None:  # else the reader first hands over received frames
                if self._loss is None:
                    more = "NCCL_DEBUG=INFO says more, or use" if self._backend == "nccl" else "use"
                    self._loss = f"the link did not form: {first_line(error)}; {more} transport=auto"
                    if not self._rank:  # the target raises it
                        logger.warning("%s", self._loss)
                self._interrupt()  # so that the peer does not wait
                self._inbox.put(None)
            self._loss = self._loss or CLOSED_BY_PEER
        finally:
            if self._is_closing:
                self._interrupt()  # also after `close` has stopped waiting

    def _run_reader(self) -> None:
        """Fill the inbox until the peer is lost or this end is closed."""
        reason = CLOSED_BY_PEER
        try:
            while not self._is_closing and (frame := self._read_next()) is not None:
                self._inbox.put(frame)
        except PeerProtocolError as error:
            reason = str(error)
            logger.warning("lost the peer: %s", reason)
            self._interrupt()  # so that the peer learns of it
        except Exception as error:  # noqa: BLE001 - whatever it is, the link is lost
            logger.debug("lost the peer: %s", error)
        self._end_sending(reason)
        if not self._is_closing:
            self._inbox.put(None)

    def _form_groups(self) -> None:
        """Wait for the peer, and form the groups. Raises RuntimeError if this end closes first."""
        store = file_store(self._folder, 2)
        store.set(f"arrived/{self._rank}", "1")
        while not store.check([f"arrived/{self._peer}"]):
            if self._is_closing:
                raise RuntimeError(CLOSED)
            time.sleep(_MEET_SECONDS)
        self._blocks = gloo_group(_c10d.PrefixStore("blocks", store), self._rank, 2, FORM_SECONDS)
        bodies = dict.fromkeys(range(2), Bodies(self._blocks))
        if self._backend == "nccl":
            for sender in range(2):  # NCCL runs a group's exchanges one by one: each direction has its own
                group = device_bodies(_c10d.PrefixStore(f"bodies/{sender}", store), self._rank, self._device)
                if sender == self._rank:  # its first exchange makes the communicator
                    group.send(b"\0", self._peer)
                else:
                    group.receive(1, self._peer)
                bodies[sender] = group
        self._bodies = bodies

    def _write(self, frame: bytes) -> None:
        is_short = len(frame) <= BLOCK_BYTES - _LENGTH.size
        self._send_block(len(frame), frame if is_short else b"")
        if not is_short:
            self._bodies[self._rank].send(frame, self._peer)

    def _send_block(self, length: int, content: bytes = b"", patience: timedelta = _FOREVER) -> None:
        block = bytearray((_LENGTH.pack(length) + content).ljust(BLOCK_BYTES, b"\0"))
        self._blocks.send([torch.frombuffer(block, dtype=torch.uint8)], self._peer, _BLOCK_TAG).wait(patience)

    def _read_next(self) -> bytes | None:
        """The next frame; None after a goodbye. Raises RuntimeError, or PeerProtocolError for a bad length."""
        block = bytearray(BLOCK_BYTES)
        self._blocks.recv([torch.frombuffer(block, dtype=torch.uint8)], self._peer, _BLOCK_TAG).wait(_FOREVER)
        (length,) = _LENGTH.unpack_from(block)
        if length == _GOODBYE:
            return None
        if length > MAX_FRAME_BYTES:
            raise PeerProtocolError(f"the peer announced {length} bytes, at most {MAX_FRAME_BYTES} are allowed")
        if length <= BLOCK_BYTES - _LENGTH.size:
            return bytes(block[_LENGTH.size : _LENGTH.size + length])
        return self._bodies[self._peer].receive(length, self._peer)

    def _interrupt(self) -> None:
        """End all waits, for good."""
        if self._blocks is None:
            return
        if self._backend == "nccl":
            for bodies in self._bodies.values():
                with suppress(RuntimeError):
                    bodies.group.abort()
        break_gloo(self._blocks, self._peer)


def file_store(folder: Path, size: int) -> Any:
    """The store of `size` processes that meet in a folder. Raises RuntimeError if the folder is gone."""
    if not folder.is_dir():  # a FileStore would wait for the folder for minutes
        raise RuntimeError(f"{folder} is gone")
    return _c10d.FileStore(str(folder / "store"), size)


def gloo_group(store: Any, rank: int, size: int, seconds: float, host: str = "127.0.0.1") -> Any:
    """A group that listens at `host`. Raises RuntimeError if it does not form within `seconds`."""
    options = _c10d.ProcessGroupGloo._Options()  # noqa: SLF001 - the options of a process group have no public names
    options._timeout = timedelta(seconds=seconds)  # noqa: SLF001
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
    options._threads = 1  # noqa: SLF001
    return _c10d.ProcessGroupGloo(store, rank, size, options)


def break_gloo(group: Any, peer: int) -> None:
    """End all exchanges. Gloo cannot cancel one, but an exchange that times out breaks the connection."""
    with suppress(RuntimeError):
        group.recv([torch.empty(1)], peer, _NO_TAG).wait(timedelta(milliseconds=1))


def nccl_group(store: Any, rank: int, size: int, device: str, options: Any, seconds: float) -> Any:
    """A group whose exchanges end after `seconds`. Sets `NCCL_SETTINGS` for this process."""
    os.environ.update(NCCL_SETTINGS)
    options._timeout = timedelta(seconds=seconds)  # noqa: SLF001
    with torch.cuda.device(device):
        return _c10d.ProcessGroupNCCL(store, rank, size, options)


def device_bodies(store: Any, rank: int, device: str) -> Bodies:
    """Bodies from device to device; their kernels use one block, on a stream of their own."""
    options = _c10d.ProcessGroupNCCL.Options()
    options.config.max_ctas = 1
    group = nccl_group(store, rank, 2, device, options, FORM_SECONDS)
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
    return Bodies(group, timedelta(seconds=DEVICE_BODY_SECONDS), device, lambda: torch.cuda.stream(stream))


def check_backend(backend: Backend, devices: tuple[str, str]) -> None:
    """Raise ConfigError if NCCL is wanted and cannot link the target's and the draft's device."""
    places = [torch.device(device) for device in devices]
    numbers = {place.index or 0 for place in places if place.type == "cuda"}
    has_two = distributed.is_nccl_available() and torch.cuda.device_count() > 1 and len(numbers) > 1
    if backend == "nccl" and not has_two:
        told = f"the target is on {devices[0]}, the draft on {devices[1]}, of {torch.cuda.device_count()}"
        raise ConfigError(f"transport=nccl: needs NCCL and a GPU for each worker; {told}; use transport=auto")
