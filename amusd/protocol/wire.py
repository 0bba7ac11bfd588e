"""Message <-> frame: the only place that knows what travels. Knows no socket, session or meaning.

Little-endian, no padding, one frame per message. Every frame begins with the header:

    offset  size  field
    0       4     magic, b"AMSD"
    4       2     PROTOCOL_VERSION
    6       2     kind of message (`layouts.py`)
    8       8     session nonce: any 64-bit number, chosen by the target for one link
    16      8     when it was sent, in nanoseconds of the sender's monotonic clock; says nothing about the message

The body is the message (`layouts.py`). Behind it stands the CRC-32 of all before it (uint32): a link may damage a
frame, and a token that was changed on its way would be believed.

A frame has exactly one reading and a message exactly one frame: decoding and encoding again gives the bytes back. A
checksum proves nothing about the sender, so every field is checked all the same. Changing any of this, or of a layout,
means raising `PROTOCOL_VERSION`; `tests/protocol/test_wire.py` holds frames of this version, byte for byte.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from amusd.errors import WireError
from amusd.protocol.fields import MAX_NAMES, MAX_ROW_BYTES, MAX_ROWS, MAX_TEXT_BYTES, MAX_TOKENS
from amusd.protocol.layouts import LAYOUTS, Layout
from amusd.protocol.messages import PROTOCOL_VERSION, Message

__all__ = [
    "MAX_FRAME_BYTES",
    "MAX_NAMES",
    "MAX_ROWS",
    "MAX_ROW_BYTES",
    "MAX_TEXT_BYTES",
    "MAX_TOKENS",
    "Frame",
    "decode",
    "encode",
    "seal",
]

MAX_FRAME_BYTES = 8 << 20
"""Bytes of a frame at most, header included."""

_MAGIC = b"AMSD"
_HEADER = struct.Struct("<4sHHQQ")
_CHECKSUM = struct.Struct("<I")
_BY_KIND = {layout.kind: layout for layout in LAYOUTS}
_BY_TYPE: dict[type, Layout] = {layout.message_type: layout for layout in LAYOUTS}


class Frame(NamedTuple):
    """What a frame says."""

    nonce: int
    sent_ns: int
    message: Message


def seal(frame: bytes) -> bytes:
    """With its checksum behind it."""
    return frame + _CHECKSUM.pack(zlib.crc32(frame))


def encode(message: Message, nonce: int, sent_ns: int = 0) -> bytes:
    """One frame. Raises ValueError when a field does not fit, because that is the caller's mistake, not the peer's."""
    layout = _BY_TYPE.get(type(message))
    if layout is None:
        raise ValueError(f"{type(message).__name__} is not a message")
    body = layout.pack(message)
    try:
        header = _HEADER.pack(_MAGIC, PROTOCOL_VERSION, layout.kind, nonce, sent_ns)
    except struct.error as error:
        raise ValueError(f"{type(message).__name__} does not fit a frame: {error}") from error
    frame = seal(header + body)
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(frame)} bytes, at most {MAX_FRAME_BYTES} fit a frame")
    return frame


def decode(frame: bytes | memoryview) -> Frame:
    """What one frame says. Raises WireError, and nothing else, on any other bytes."""
    size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
    smallest = _HEADER.size + _CHECKSUM.size
    if not smallest <= size <= MAX_FRAME_BYTES:
        raise WireError(f"frame of {size} bytes, {smallest} to {MAX_FRAME_BYTES} are allowed")
    frame = bytes(frame)  # no copy when it is bytes already
    magic, version, kind, nonce, sent_ns = _HEADER.unpack_from(frame)
    if magic != _MAGIC:
        raise WireError("not a frame of this protocol")
    if version != PROTOCOL_VERSION:
        raise WireError(f"protocol version {version}, this side speaks {PROTOCOL_VERSION}")
    sealed = frame[: -_CHECKSUM.size]
    if _CHECKSUM.unpack_from(frame, len(sealed))[0] != zlib.crc32(sealed):
        raise WireError("damaged: its checksum is another one")
    layout = _BY_KIND.get(kind)
    if layout is None:
        raise WireError(f"unknown message kind {kind}")
    return Frame(nonce, sent_ns, layout.unpack(sealed, _HEADER.size))
