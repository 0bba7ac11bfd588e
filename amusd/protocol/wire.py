"""Messages to frames and back: the only place that knows the byte layout.

One frame per message, numbers little-endian:

    offset  size  field
    0       4     magic, b"AMSD"
    4       2     PROTOCOL_VERSION
    6       8     session nonce: any 64-bit number, chosen by the target for one link
    14      8     time of sending, in nanoseconds of the sender's monotonic clock
    22            the message in MessagePack: a list of its tag and its fields (`messages.py`)
    at the end 4  CRC-32 of all before it

The checksum detects damage, and proves nothing about the sender: every field is checked all the same. A message has
exactly one frame. `tests/protocol/test_wire.py` holds frames of this version, byte for byte.
"""

from __future__ import annotations

import struct
import zlib

import msgspec

from amusd.errors import ConfigError, PeerProtocolError
from amusd.protocol.messages import PROTOCOL_VERSION, Message
from amusd.settings import shown

MAX_FRAME_BYTES = 8 << 20

_MAGIC = b"AMSD"
_HEADER = struct.Struct("<4sHQQ")
_CHECKSUM = struct.Struct("<I")
_MIN_FRAME_BYTES = _HEADER.size + _CHECKSUM.size
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_REFUSALS = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, struct.error)


def encode(message: Message, nonce: int, sent_ns: int = 0) -> bytes:
    """One frame. Raises ValueError when a field does not fit: the caller's mistake."""
    try:
        body = _ENCODER.encode(message)
        _DECODER.decode(body)  # the encoder takes any value
        frame = _HEADER.pack(_MAGIC, PROTOCOL_VERSION, nonce, sent_ns) + body
        frame += _CHECKSUM.pack(zlib.crc32(frame))
    except _REFUSALS as error:
        raise ValueError(f"{type(message).__name__} does not fit a frame: {error}") from error
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(f"{type(message).__name__} of {len(frame)} bytes, at most {MAX_FRAME_BYTES} fit a frame")
    return frame


def nonce_of(frame: bytes) -> int:
    """The nonce in a frame of any version; 0 where the frame is too short to have one."""
    return int(_HEADER.unpack_from(frame)[2]) if len(frame) >= _HEADER.size else 0


def decode(frame: bytes) -> tuple[int, int, Message]:
    """Nonce, time of sending and message of a frame.

    Raises ConfigError for a frame of another version, and PeerProtocolError on any other bytes.
    """
    if not _MIN_FRAME_BYTES <= len(frame) <= MAX_FRAME_BYTES:
        raise PeerProtocolError(f"frame of {len(frame)} bytes, {_MIN_FRAME_BYTES} to {MAX_FRAME_BYTES} are allowed")
    magic, version, nonce, sent_ns = _HEADER.unpack_from(frame)
    if magic != _MAGIC:
        raise PeerProtocolError("not a frame of this protocol")
    sealed = frame[: -_CHECKSUM.size]
    if _CHECKSUM.unpack_from(frame, len(sealed))[0] != zlib.crc32(sealed):
        raise PeerProtocolError("damaged: its checksum is another one")
    if version != PROTOCOL_VERSION:
        both = "install one amusd at both ends of the link"
        raise ConfigError(f"the peer speaks protocol version {version}, this side {PROTOCOL_VERSION}: {both}")
    body = sealed[_HEADER.size :]
    try:
        message = _DECODER.decode(body)
    except _REFUSALS as error:
        raise PeerProtocolError(f"not a message: {shown(error)}") from None
    if _ENCODER.encode(message) != body:
        raise PeerProtocolError(f"{type(message).__name__} in other bytes than those of its only frame")
    return nonce, sent_ns, message
