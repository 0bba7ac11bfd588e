"""Message <-> frame: the only place that knows how a message becomes bytes. Knows no socket, session or meaning.

Little-endian, no padding, one frame per message. Every frame begins with the header:

    offset  size  field
    0       4     magic, b"AMSD"
    4       2     PROTOCOL_VERSION
    6       2     kind (`_LAYOUTS`)
    8       8     session nonce: any 64-bit number, chosen by the target for one link
    16      8     when it was sent, in nanoseconds of the sender's monotonic clock; says nothing about the message

The body is the message's fields in the order of `_LAYOUTS`: first the fixed part of every field, then the tails of the
fields that have one, both in that order. Behind it stands the CRC-32 of all before it (uint32): a link may damage a
frame, and a token that was changed on its way would be believed.

    field type  fixed part                      tail
    COUNT       int64 in [0, 2^63)              -
    HASH        uint64                          -
    FLAG        uint8, 0 or 1                   -
    ROLE        uint8, index in `_ROLES`        -
    REASON      uint8, index in `_REASONS`      -
    IDS         uint32, number of ids           int32 in [0, 2^31) each
    TEXT        uint32, number of bytes         UTF-8
    NAMES       uint32, number of names         each: uint32 number of bytes, UTF-8
    ROWS        uint32, number of rows          each: uint32 number of bytes, that many
    DISTRIBUTION uint32, number of biases       `_DISTRIBUTION`, then each bias: int32 in [0, 2^31), float64

A frame has exactly one reading and a message exactly one frame: decoding and encoding again gives the bytes back. A
checksum proves nothing about the sender: a length is compared with its limit and with what is left of the frame before
anything is allocated. Changing any of this means raising `PROTOCOL_VERSION`; `tests/protocol/test_wire.py` holds frames
of this version, byte for byte.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, get_args

from amusd.config import MAX_BIASES, AcceptanceRule, Distribution
from amusd.errors import ConfigError, WireError
from amusd.protocol.messages import (
    PROTOCOL_VERSION,
    Candidate,
    Close,
    Failed,
    Hello,
    Message,
    Open,
    Prepared,
    Progress,
    Shutdown,
    Verdict,
)
from amusd.types import FinishReason, Role

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
MAX_FRAME_BYTES = 8 << 20
"""Bytes of a frame at most, header included."""

_MAGIC = b"AMSD"
_HEADER = struct.Struct("<4sHHQQ")
_LENGTH = struct.Struct("<I")
_CHECKSUM = struct.Struct("<I")
_DISTRIBUTION = struct.Struct("<5dqqB")
"""temperature, top_p, min_p, repetition_penalty, presence_penalty, top_k, seed, index in `_RULES`."""
_BIAS = struct.Struct("<id")
_RULES: tuple[AcceptanceRule, ...] = get_args(AcceptanceRule)
_ROLES = (Role.TARGET, Role.DRAFT)
_REASONS = (FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORTED)


@dataclass(frozen=True, slots=True)
class _FieldType:
    """How one type of field is laid out. `pack` raises ValueError, `unpack` WireError."""

    format: str
    """Struct code of the fixed part."""
    pack: Callable[[Any], tuple[int, bytes]] | None = None
    """Value -> (fixed part, tail). None: the value is its own fixed part and there is no tail."""
    unpack: Callable[[int, bytes, int], tuple[Any, int]] | None = None
    """(fixed part, frame, offset of the tail) -> (value, offset behind the tail)."""


def _one_of(values: Sequence[object]) -> _FieldType:
    codes = {value: code for code, value in enumerate(values)}

    def pack(value: object) -> tuple[int, bytes]:
        if value not in codes:
            raise ValueError(f"{value!r} is none of {values}")
        return codes[value], b""

    def unpack(code: int, frame: bytes, offset: int) -> tuple[object, int]:  # noqa: ARG001  # the common signature
        if code >= len(values):
            raise WireError(f"{code} stands for none of {values}")
        return values[code], offset

    return _FieldType("B", pack, unpack)


def _check_tail(what: str, number: int, limit: int, num_bytes: int, frame: bytes, offset: int) -> int:
    """Offset behind a tail of `num_bytes`, once it is known to be within its limit and within the frame."""
    if number > limit:
        raise WireError(f"{number} {what}, at most {limit} are allowed")
    if num_bytes > len(frame) - offset:
        raise WireError(f"{number} {what} announced, {len(frame) - offset} bytes left")
    return offset + num_bytes


def _pack_ids(token_ids: tuple[int, ...]) -> tuple[int, bytes]:
    number = len(token_ids)
    if number > MAX_TOKENS or (number and min(token_ids) < 0):
        raise ValueError(f"a message holds at most {MAX_TOKENS} token ids, none negative")
    return number, struct.pack(f"<{number}i", *token_ids)


def _unpack_ids(number: int, frame: bytes, offset: int) -> tuple[tuple[int, ...], int]:
    end = _check_tail("token ids", number, MAX_TOKENS, 4 * number, frame, offset)
    token_ids = struct.unpack_from(f"<{number}i", frame, offset)
    if number and min(token_ids) < 0:
        raise WireError("negative token id")
    return token_ids, end


def _pack_text(text: str) -> tuple[int, bytes]:
    data = text.encode("utf-8")
    if len(data) > MAX_TEXT_BYTES:
        raise ValueError(f"text of {len(data)} bytes, at most {MAX_TEXT_BYTES} fit a message")
    return len(data), data


def _unpack_text(number: int, frame: bytes, offset: int) -> tuple[str, int]:
    end = _check_tail("bytes of text", number, MAX_TEXT_BYTES, number, frame, offset)
    try:
        return frame[offset:end].decode("utf-8"), end
    except UnicodeDecodeError as error:
        raise WireError(f"text is not UTF-8: {error.reason}") from None


def _pack_names(names: tuple[str, ...]) -> tuple[int, bytes]:
    if len(names) > MAX_NAMES:
        raise ValueError(f"{len(names)} names, at most {MAX_NAMES} fit a message")
    return len(names), b"".join(_LENGTH.pack(number) + data for number, data in map(_pack_text, names))


def _unpack_names(number: int, frame: bytes, offset: int) -> tuple[tuple[str, ...], int]:
    _check_tail("names", number, MAX_NAMES, _LENGTH.size * number, frame, offset)
    names = []
    for _ in range(number):
        end = _check_tail("name", 1, 1, _LENGTH.size, frame, offset)
        name, offset = _unpack_text(_LENGTH.unpack_from(frame, offset)[0], frame, end)
        names.append(name)
    return tuple(names), offset


def _pack_rows(rows: tuple[bytes, ...]) -> tuple[int, bytes]:
    if len(rows) > MAX_ROWS or max(map(len, rows), default=0) > MAX_ROW_BYTES:
        raise ValueError(f"a message holds at most {MAX_ROWS} rows of at most {MAX_ROW_BYTES} bytes")
    return len(rows), b"".join(_LENGTH.pack(len(row)) + row for row in rows)


def _unpack_rows(number: int, frame: bytes, offset: int) -> tuple[tuple[bytes, ...], int]:
    _check_tail("rows", number, MAX_ROWS, _LENGTH.size * number, frame, offset)
    rows = []
    for _ in range(number):
        start = _check_tail("row", 1, 1, _LENGTH.size, frame, offset)
        length = _LENGTH.unpack_from(frame, offset)[0]
        offset = _check_tail("bytes of a row", length, MAX_ROW_BYTES, length, frame, start)
        rows.append(frame[start:offset])
    return tuple(rows), offset


def _pack_distribution(distribution: Distribution) -> tuple[int, bytes]:
    number = len(distribution.logit_bias)
    if number > MAX_BIASES:
        raise ValueError(f"{number} biases, at most {MAX_BIASES} fit a message")
    fixed = _DISTRIBUTION.pack(
        distribution.temperature,
        distribution.top_p,
        distribution.min_p,
        distribution.repetition_penalty,
        distribution.presence_penalty,
        distribution.top_k,
        distribution.seed,
        _RULES.index(distribution.acceptance),
    )
    return number, fixed + b"".join(_BIAS.pack(*bias) for bias in distribution.logit_bias)


def _unpack_distribution(number: int, frame: bytes, offset: int) -> tuple[Distribution, int]:
    size = _DISTRIBUTION.size + _BIAS.size * number
    end = _check_tail("biases", number, MAX_BIASES, size, frame, offset)
    temperature, top_p, min_p, repetition, presence, top_k, seed, rule = _DISTRIBUTION.unpack_from(frame, offset)
    if rule >= len(_RULES):
        raise WireError(f"{rule} stands for none of {_RULES}")
    biases = _BIAS.iter_unpack(frame[offset + _DISTRIBUTION.size : end])
    try:
        distribution = Distribution(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition,
            presence_penalty=presence,
            logit_bias=tuple((token_id, bias) for token_id, bias in biases),
            acceptance=_RULES[rule],
            seed=seed,
        )
    except ConfigError as error:
        raise WireError(str(error)) from None
    return distribution, end


COUNT = _FieldType("q")
HASH = _FieldType("Q")
FLAG = _one_of((False, True))
ROLE = _one_of(_ROLES)
REASON = _one_of(_REASONS)
IDS = _FieldType("I", _pack_ids, _unpack_ids)
TEXT = _FieldType("I", _pack_text, _unpack_text)
NAMES = _FieldType("I", _pack_names, _unpack_names)
ROWS = _FieldType("I", _pack_rows, _unpack_rows)
DISTRIBUTION = _FieldType("I", _pack_distribution, _unpack_distribution)


class _Layout:
    """The body of one message. Field types are sorted out once, so that a message costs a few microseconds."""

    def __init__(self, kind: int, message_type: type[Message], /, **fields: _FieldType) -> None:
        self.kind = kind
        self.message_type = message_type
        self.field_names = tuple(fields)
        self._body = struct.Struct("<" + "".join(field.format for field in fields.values()))
        self._frame = struct.Struct(_HEADER.format + self._body.format[1:])
        # attrgetter gives a tuple for two names or more, which every message but Shutdown has
        self._values: Callable[[Message], tuple[Any, ...]] = attrgetter(*fields) if fields else lambda _: ()
        self._counts = tuple(index for index, field in enumerate(fields.values()) if field is COUNT)
        self._packed = tuple((index, field.pack) for index, field in enumerate(fields.values()) if field.pack)
        self._unpacked = tuple((index, field.unpack) for index, field in enumerate(fields.values()) if field.unpack)

    def encode(self, message: Message, nonce: int, sent_ns: int) -> bytes:
        """The whole frame. Raises ValueError."""
        values = list(self._values(message))
        tails = [b""]
        try:
            for index, pack in self._packed:
                values[index], tail = pack(values[index])
                tails.append(tail)
            for index in self._counts:
                if values[index] < 0:
                    raise ValueError(f"{self.field_names[index]}={values[index]} is negative")
            tails[0] = self._frame.pack(_MAGIC, PROTOCOL_VERSION, self.kind, nonce, sent_ns, *values)
        except (struct.error, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{self.message_type.__name__} does not fit a frame: {error}") from error
        frame = seal(b"".join(tails))
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(
                f"{self.message_type.__name__} of {len(frame)} bytes, at most {MAX_FRAME_BYTES} fit a frame"
            )
        return frame

    def decode(self, frame: bytes) -> Message:
        """The message of a frame whose header is known to be sound, without its checksum. Raises WireError."""
        end = _HEADER.size + self._body.size
        if end > len(frame):
            raise WireError(f"{self.message_type.__name__} needs {end} bytes, the frame has {len(frame)}")
        values = list(self._body.unpack_from(frame, _HEADER.size))
        for index in self._counts:
            if values[index] < 0:
                raise WireError(f"{self.message_type.__name__}.{self.field_names[index]} is negative")
        for index, unpack in self._unpacked:
            values[index], end = unpack(values[index], frame, end)
        if end != len(frame):
            raise WireError(f"{len(frame) - end} bytes behind the end of {self.message_type.__name__}")
        return self.message_type(*values)


_LAYOUTS = (
    _Layout(
        1,
        Hello,
        protocol_version=COUNT,
        role=ROLE,
        incarnation=COUNT,
        vocab_size=COUNT,
        tokenizer_hash=TEXT,
        drafters=NAMES,
        tree_drafters=NAMES,
    ),
    _Layout(
        2,
        Open,
        sequence_id=COUNT,
        incarnation=COUNT,
        token_ids=IDS,
        max_length=COUNT,
        drafter=TEXT,
        max_lookahead=COUNT,
        tokens_per_message=COUNT,
        reference=IDS,
        distribution=DISTRIBUTION,
        fan_out=COUNT,
        rows_per_step=COUNT,
    ),
    _Layout(
        3,
        Candidate,
        sequence_id=COUNT,
        incarnation=COUNT,
        epoch=COUNT,
        base=COUNT,
        start=COUNT,
        token_ids=IDS,
        prefix_hash=HASH,
        more=FLAG,
        draft_probs=ROWS,
    ),
    _Layout(
        4,
        Verdict,
        sequence_id=COUNT,
        incarnation=COUNT,
        epoch_floor=COUNT,
        start=COUNT,
        token_ids=IDS,
        num_accepted=COUNT,
    ),
    _Layout(5, Close, sequence_id=COUNT, reason=REASON),
    _Layout(
        6,
        Progress,
        role=ROLE,
        sequence_id=COUNT,
        num_steps=COUNT,
        num_drafted=COUNT,
        num_rollbacks=COUNT,
        num_stale=COUNT,
        busy_ns=COUNT,
        wait_ns=COUNT,
        open_ns=COUNT,
    ),
    _Layout(7, Failed, role=ROLE, kind=TEXT, text=TEXT),
    _Layout(8, Shutdown),
    _Layout(
        9,
        Prepared,
        sequence_id=COUNT,
        incarnation=COUNT,
        base=COUNT,
        root=COUNT,
        prefix_hash=HASH,
        first=COUNT,
        parents=IDS,
        token_ids=IDS,
        weights=IDS,
        more=FLAG,
    ),
)
_BY_KIND = {layout.kind: layout for layout in _LAYOUTS}
_BY_TYPE: dict[type, _Layout] = {layout.message_type: layout for layout in _LAYOUTS}


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
    return layout.encode(message, nonce, sent_ns)


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
    return Frame(nonce, sent_ns, layout.decode(sealed))
