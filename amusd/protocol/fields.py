"""How each type of field becomes bytes: a fixed part, which every field has, and for some a tail of any length.

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

Little-endian, no padding. A length is compared with its limit and with what is left of the frame before anything is
allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from amusd.config import MAX_BIASES, AcceptanceRule, Distribution
from amusd.errors import ConfigError, WireError
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

_LENGTH = struct.Struct("<I")
_DISTRIBUTION = struct.Struct("<5dqqB")
"""temperature, top_p, min_p, repetition_penalty, presence_penalty, top_k, seed, index in `_RULES`."""
_BIAS = struct.Struct("<id")
_RULES: tuple[AcceptanceRule, ...] = get_args(AcceptanceRule)
_ROLES = (Role.TARGET, Role.DRAFT)
_REASONS = (FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORTED)


@dataclass(frozen=True, slots=True)
class FieldType:
    """How one type of field is laid out. `pack` raises ValueError, `unpack` WireError."""

    format: str
    """Struct code of the fixed part."""
    pack: Callable[[Any], tuple[int, bytes]] | None = None
    """Value -> (fixed part, tail). None: the value is its own fixed part and there is no tail."""
    unpack: Callable[[int, bytes, int], tuple[Any, int]] | None = None
    """(fixed part, frame, offset of the tail) -> (value, offset behind the tail)."""


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


COUNT = FieldType("q")
HASH = FieldType("Q")
FLAG = _one_of((False, True))
ROLE = _one_of(_ROLES)
REASON = _one_of(_REASONS)
IDS = FieldType("I", _pack_ids, _unpack_ids)
TEXT = FieldType("I", _pack_text, _unpack_text)
NAMES = FieldType("I", _pack_names, _unpack_names)
ROWS = FieldType("I", _pack_rows, _unpack_rows)
DISTRIBUTION = FieldType("I", _pack_distribution, _unpack_distribution)
