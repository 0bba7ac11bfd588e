"""Message <-> frame: the only place that knows the byte layout. Knows no socket, session or meaning.

Little-endian, no padding, one frame per message. Every frame begins with the header:

    offset  size  field
    0       4     magic, b"AMSD"
    4       2     PROTOCOL_VERSION
    6       2     kind of message: its place in `Message`, from 1
    8       8     session nonce: any 64-bit number, chosen by the target for one link
    16      8     when it was sent, in nanoseconds of the sender's monotonic clock; says nothing about the message

The body holds the fields of the message in the order of its class (`messages.py`): first the fixed part of every field,
then the tails of the fields that have one.

    type of the field        fixed part                      tail
    int                      int64 in [0, 2^63)              -
    Unsigned64               uint64                          -
    bool, Role, FinishReason uint8, index in its values      -
    tuple[int, ...]          uint32, number of ids           each: int32 in [0, 2^31)
    SequenceIds              uint32, number of ids           each: uint64
    str                      uint32, number of bytes         UTF-8
    bytes                    uint32, number of bytes         the bytes
    tuple[str or bytes, ...] uint32, number of items         each: uint32 number of bytes, the bytes
    Distribution             uint32, number of biases        `_DISTRIBUTION`, then each bias: int32, float64

Behind the body stands the CRC-32 of all before it (uint32): a link may damage a frame, and a token that was changed on
its way would be believed. A checksum proves nothing about the sender, so every field is checked all the same, and a
length is compared with its limit and with what is left of the frame before anything is allocated.

A frame has exactly one reading and a message exactly one frame: decoding and encoding again gives the bytes back.
Changing any of this, or the fields of a message, means raising `PROTOCOL_VERSION`; `tests/protocol/test_wire.py` holds
frames of this version, byte for byte.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, get_args, get_type_hints

from amusd.config import MAX_BIASES, MAX_NUM_SEQS, AcceptanceRule, Distribution
from amusd.errors import ConfigError, WireError
from amusd.protocol.messages import PROTOCOL_VERSION, Message, SequenceIds, Unsigned64
from amusd.types import FinishReason, Role

MAX_FRAME_BYTES = 8 << 20
"""Bytes of a frame at most, header included."""
MAX_TOKENS = 1 << 20
"""Token ids in one message at most."""
MAX_TEXT_BYTES = 1 << 16
"""UTF-8 bytes of one text field, or of one name, at most."""
MAX_NAMES = 256
"""Names in one message at most."""
MAX_ROWS = 1 << 12
"""Rows of probabilities in one message at most."""
MAX_ROW_BYTES = 1 << 15
"""Bytes of one such row at most."""
MAX_FEATURE_BYTES = 1 << 20
"""Bytes of features in one message at most."""

_MAGIC = b"AMSD"
_HEADER = struct.Struct("<4sHHQQ")
_LENGTH = struct.Struct("<I")  # of a tail, and of the checksum
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "seed",
)
_DISTRIBUTION = struct.Struct("<6dqqB")  # _NUMBERS, index in _RULES
_BIAS = struct.Struct("<id")
_RULES: tuple[AcceptanceRule, ...] = get_args(AcceptanceRule)


class Frame(NamedTuple):
    """The content of a frame."""

    nonce: int
    sent_ns: int
    message: Message


def seal(frame: bytes) -> bytes:
    """The frame with its checksum behind it."""
    return frame + _LENGTH.pack(zlib.crc32(frame))


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
    """The content of one frame. Raises WireError, and nothing else, on any other bytes."""
    size = frame.nbytes if isinstance(frame, memoryview) else len(frame)
    smallest = _HEADER.size + _LENGTH.size
    if not smallest <= size <= MAX_FRAME_BYTES:
        raise WireError(f"frame of {size} bytes, {smallest} to {MAX_FRAME_BYTES} are allowed")
    frame = bytes(frame)  # no copy when it is bytes already
    magic, version, kind, nonce, sent_ns = _HEADER.unpack_from(frame)
    if magic != _MAGIC:
        raise WireError("not a frame of this protocol")
    if version != PROTOCOL_VERSION:
        raise WireError(f"protocol version {version}, this side speaks {PROTOCOL_VERSION}")
    sealed = frame[: -_LENGTH.size]
    if _LENGTH.unpack_from(frame, len(sealed))[0] != zlib.crc32(sealed):
        raise WireError("damaged: its checksum is another one")
    layout = _BY_KIND.get(kind)
    if layout is None:
        raise WireError(f"unknown message kind {kind}")
    return Frame(nonce, sent_ns, layout.unpack(sealed, _HEADER.size))


@dataclass(frozen=True, slots=True)
class FieldType:
    """How one type of field is laid out. `pack` raises ValueError, `unpack` WireError."""

    format: str
    """Struct code of the fixed part."""
    pack: Callable[[Any], tuple[int, bytes]] | None = None
    """Value -> (fixed part, tail). None: the value is its own fixed part and there is no tail."""
    unpack: Callable[[int, bytes, int], tuple[Any, int]] | None = None
    """(fixed part, frame, offset of the tail) -> (value, offset behind the tail)."""


class Layout:
    """The body of one message. Field types are sorted out once, so that a message costs a few microseconds."""

    def __init__(self, kind: int, message_type: type[Message]) -> None:
        hints = get_type_hints(message_type, include_extras=True)
        fields = [_FIELD_TYPES[hint] for hint in hints.values()]
        self.kind = kind
        self.message_type = message_type
        self.field_names = tuple(hints)
        self._body = struct.Struct("<" + "".join(field.format for field in fields))
        # attrgetter gives a tuple for two names or more, which every message but Shutdown has
        self._values: Callable[[Message], tuple[Any, ...]] = attrgetter(*hints) if hints else lambda _: ()
        self._counts = tuple(index for index, field in enumerate(fields) if field is _COUNT)
        self._packed = tuple((index, field.pack) for index, field in enumerate(fields) if field.pack)
        self._unpacked = tuple((index, field.unpack) for index, field in enumerate(fields) if field.unpack)

    def pack(self, message: Message) -> bytes:
        """The body. Raises ValueError."""
        values = list(self._values(message))
        tails = [b""]
        try:
            for index, pack in self._packed:
                values[index], tail = pack(values[index])
                tails.append(tail)
            for index in self._counts:
                if values[index] < 0:
                    raise ValueError(f"{self.field_names[index]}={values[index]} is negative")
            tails[0] = self._body.pack(*values)
        except (struct.error, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{self.message_type.__name__} does not fit a frame: {error}") from error
        return b"".join(tails)

    def unpack(self, frame: bytes, start: int) -> Message:
        """The message whose body lies behind `start` and ends with the frame. Raises WireError."""
        end = start + self._body.size
        if end > len(frame):
            raise WireError(f"{self.message_type.__name__} needs {end} bytes, the frame has {len(frame)}")
        values = list(self._body.unpack_from(frame, start))
        for index in self._counts:
            if values[index] < 0:
                raise WireError(f"{self.message_type.__name__}.{self.field_names[index]} is negative")
        for index, unpack in self._unpacked:
            values[index], end = unpack(values[index], frame, end)
        if end != len(frame):
            raise WireError(f"{len(frame) - end} bytes behind the end of {self.message_type.__name__}")
        return self.message_type(*values)


def _check_tail(what: str, number: int, limit: int, num_bytes: int, frame: bytes, offset: int) -> int:
    """The offset behind a tail of `num_bytes`, once it is known to be within its limit and within the frame."""
    if number > limit:
        raise WireError(f"{number} {what}, at most {limit} are allowed")
    if num_bytes > len(frame) - offset:
        raise WireError(f"{number} {what} announced, {len(frame) - offset} bytes left")
    return offset + num_bytes


def _one_of(values: Sequence[object]) -> FieldType:
    codes = {value: code for code, value in enumerate(values)}

    def pack(value: object) -> tuple[int, bytes]:
        if value not in codes:
            raise ValueError(f"{value!r} is none of {values}")
        return codes[value], b""

    def unpack(code: int, frame: bytes, offset: int) -> tuple[object, int]:  # noqa: ARG001  # the common signature
        if code >= len(values):
            raise WireError(f"{code} stands for none of {values}")
        return values[code], offset

    return FieldType("B", pack, unpack)


def _blob(what: str, limit: int, to_bytes: Callable[[Any], bytes], from_bytes: Callable[[bytes], Any]) -> FieldType:
    def pack(value: object) -> tuple[int, bytes]:
        data = to_bytes(value)
        if len(data) > limit:
            raise ValueError(f"{len(data)} {what}, at most {limit} fit a message")
        return len(data), data

    def unpack(number: int, frame: bytes, offset: int) -> tuple[object, int]:
        end = _check_tail(what, number, limit, number, frame, offset)
        return from_bytes(frame[offset:end]), end

    return FieldType("I", pack, unpack)


def _sequence(what: str, limit: int, item: FieldType) -> FieldType:
    """Items that have a tail each."""
    pack_item, unpack_item = item.pack, item.unpack
    assert pack_item is not None
    assert unpack_item is not None

    def pack(values: Sequence[object]) -> tuple[int, bytes]:
        if len(values) > limit:
            raise ValueError(f"{len(values)} {what}, at most {limit} fit a message")
        return len(values), b"".join(_LENGTH.pack(number) + tail for number, tail in map(pack_item, values))

    def unpack(number: int, frame: bytes, offset: int) -> tuple[tuple[object, ...], int]:
        _check_tail(what, number, limit, _LENGTH.size * number, frame, offset)
        values = []
        for _ in range(number):
            start = _check_tail(what, 1, limit, _LENGTH.size, frame, offset)
            value, offset = unpack_item(_LENGTH.unpack_from(frame, offset)[0], frame, start)
            values.append(value)
        return tuple(values), offset

    return FieldType("I", pack, unpack)


def _ids(what: str, limit: int, code: str) -> FieldType:
    """`code`: the struct code of each."""

    def pack(ids: tuple[int, ...]) -> tuple[int, bytes]:
        number = len(ids)
        if number > limit or (number and min(ids) < 0):
            raise ValueError(f"a message holds at most {limit} {what} ids, none negative")
        return number, struct.pack(f"<{number}{code}", *ids)

    def unpack(number: int, frame: bytes, offset: int) -> tuple[tuple[int, ...], int]:
        end = _check_tail(f"{what} ids", number, limit, struct.calcsize(code) * number, frame, offset)
        ids = struct.unpack_from(f"<{number}{code}", frame, offset)
        if number and min(ids) < 0:
            raise WireError(f"negative {what} id")
        return ids, end

    return FieldType("I", pack, unpack)


def _decode_text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WireError(f"text is not UTF-8: {error.reason}") from None


def _pack_distribution(distribution: Distribution) -> tuple[int, bytes]:
    number = len(distribution.logit_bias)
    if number > MAX_BIASES:
        raise ValueError(f"{number} biases, at most {MAX_BIASES} fit a message")
    numbers = [getattr(distribution, name) for name in _NUMBERS]
    fixed = _DISTRIBUTION.pack(*numbers, _RULES.index(distribution.acceptance))
    return number, fixed + b"".join(_BIAS.pack(*bias) for bias in distribution.logit_bias)


def _unpack_distribution(number: int, frame: bytes, offset: int) -> tuple[Distribution, int]:
    size = _DISTRIBUTION.size + _BIAS.size * number
    end = _check_tail("biases", number, MAX_BIASES, size, frame, offset)
    *numbers, rule = _DISTRIBUTION.unpack_from(frame, offset)
    if rule >= len(_RULES):
        raise WireError(f"{rule} stands for none of {_RULES}")
    biases = tuple(_BIAS.iter_unpack(frame[offset + _DISTRIBUTION.size : end]))
    values: dict[str, Any] = dict(zip(_NUMBERS, numbers, strict=True))
    try:
        return Distribution(**values, logit_bias=biases, acceptance=_RULES[rule]), end
    except ConfigError as error:
        raise WireError(str(error)) from None


_COUNT = FieldType("q")
_TEXT = _blob("bytes of text", MAX_TEXT_BYTES, str.encode, _decode_text)
_ROW = _blob("bytes of a row", MAX_ROW_BYTES, lambda row: row, lambda row: row)
_FIELD_TYPES: dict[Any, FieldType] = {
    int: _COUNT,
    Unsigned64: FieldType("Q"),
    bool: _one_of((False, True)),
    Role: _one_of((Role.TARGET, Role.DRAFT)),
    FinishReason: _one_of((FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORTED)),
    tuple[int, ...]: _ids("token", MAX_TOKENS, "i"),
    SequenceIds: _ids("sequence", MAX_NUM_SEQS + 1, "Q"),
    str: _TEXT,
    bytes: _blob("bytes of features", MAX_FEATURE_BYTES, lambda data: data, lambda data: data),
    tuple[str, ...]: _sequence("names", MAX_NAMES, _TEXT),
    tuple[bytes, ...]: _sequence("rows", MAX_ROWS, _ROW),
    Distribution: FieldType("I", _pack_distribution, _unpack_distribution),
}

LAYOUTS = tuple(Layout(kind, message_type) for kind, message_type in enumerate(get_args(Message), start=1))
_BY_KIND = {layout.kind: layout for layout in LAYOUTS}
_BY_TYPE: dict[type, Layout] = {layout.message_type: layout for layout in LAYOUTS}
