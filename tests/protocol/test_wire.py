"""Every message survives the wire, and no bytes whatever make `decode` raise anything but `WireError`."""

from __future__ import annotations

import struct
import tracemalloc
import typing
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import EXAMPLES, messages, nonces

from amusd.config import MAX_NUM_SEQS
from amusd.errors import WireError
from amusd.protocol.messages import (
    PROTOCOL_VERSION,
    Candidate,
    Close,
    Failed,
    Hello,
    Message,
    Open,
    Shutdown,
    Verdict,
)
from amusd.protocol.wire import (
    MAX_FRAME_BYTES,
    MAX_NAMES,
    MAX_TEXT_BYTES,
    MAX_TOKENS,
    decode,
    encode,
    seal,
)
from amusd.types import FinishReason, Role

NONCE = 0x0123456789ABCDEF
FRAMES = {type(message).__name__: encode(message, NONCE) for message in EXAMPLES}
BODIES = {name: frame[:-4] for name, frame in FRAMES.items()}
"""Without their checksum."""
CANDIDATE = Candidate(7, 1, 10, 9, 2**64 - 1, 4, (0, 4), (5, 6), (), more=True)
VERDICT = Verdict(7, 1, 3, 9, (5, 6), 2)
GOLDEN = {
    CANDIDATE: "414d5344 0800 0300 efcdab8967452301 1500000000000000"
    "0700000000000000 0100000000000000 0a00000000000000 0900000000000000 ffffffffffffffff 0400000000000000"
    "02000000 02000000 00000000 01 00000000 00000000 04000000 05000000 06000000",
    VERDICT: "414d5344 0800 0400 efcdab8967452301 1500000000000000"
    "0700000000000000 0100000000000000 0300000000000000 0900000000000000 02000000 0200000000000000 05000000 06000000",
    Hello(7, Role.DRAFT, 1, 10, "ab", ("a", "bc"), ("a",)): "414d5344 0800 0100 efcdab8967452301 1500000000000000"
    "0700000000000000 01 0100000000000000 0a00000000000000 02000000 02000000 01000000"
    "6162 01000000 61 02000000 6263 01000000 61",
}
"""Frames of version 8, before they are sealed. A change here is a change of PROTOCOL_VERSION."""


def with_a_bit_flipped(frame: bytes) -> Iterator[bytes]:
    """Each bit in turn."""
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def decodes_or_refuses(frame: bytes) -> None:
    """Either `WireError`, or a message whose only frame this is."""
    try:
        nonce, sent_ns, message = decode(frame)
    except WireError:
        return
    assert encode(message, nonce, sent_ns) == frame


@given(message=messages, nonce=nonces, sent_ns=nonces)
def test_every_message_comes_back_equal_with_its_header(message: Message, nonce: int, sent_ns: int) -> None:
    frame = encode(message, nonce, sent_ns)
    assert decode(frame) == (nonce, sent_ns, message)
    assert decode(memoryview(frame)) == (nonce, sent_ns, message)


def test_there_is_a_frame_of_every_kind_of_message() -> None:
    assert {type(message) for message in EXAMPLES} == set(typing.get_args(Message))


@pytest.mark.parametrize("message", GOLDEN, ids=lambda message: type(message).__name__)
def test_the_layout_of_this_version_does_not_change(message: Message) -> None:
    assert encode(message, NONCE, 0x15) == seal(bytes.fromhex(GOLDEN[message]))


@settings(max_examples=300)
@given(frame=st.binary(max_size=200))
def test_random_bytes_raise_only_wire_errors(frame: bytes) -> None:
    with pytest.raises(WireError):
        decode(frame)


@settings(max_examples=500)
@given(kind=st.integers(0, 11), body=st.binary(max_size=120))
def test_random_bodies_behind_a_sound_header_raise_only_wire_errors(kind: int, body: bytes) -> None:
    decodes_or_refuses(seal(struct.pack("<4sHHQQ", b"AMSD", PROTOCOL_VERSION, kind, NONCE, 0) + body))


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_cut_anywhere_is_refused(name: str) -> None:
    frame = FRAMES[name]
    for length in range(len(frame)):
        with pytest.raises(WireError):
            decode(frame[:length])
    for length in range(len(BODIES[name])):
        with pytest.raises(WireError):
            decode(seal(BODIES[name][:length]))


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_with_any_bit_flipped_is_refused(name: str) -> None:
    for flipped in with_a_bit_flipped(FRAMES[name]):
        with pytest.raises(WireError):
            decode(flipped)


@pytest.mark.parametrize("name", FRAMES)
def test_a_sealed_frame_with_any_bit_flipped_is_refused_or_is_the_frame_of_another_message(name: str) -> None:
    for flipped in with_a_bit_flipped(BODIES[name]):
        decodes_or_refuses(seal(flipped))


@pytest.mark.parametrize("name", FRAMES)
def test_bytes_behind_the_end_are_refused(name: str) -> None:
    with pytest.raises(WireError, match="behind the end"):
        decode(seal(BODIES[name] + b"\0"))
    with pytest.raises(WireError, match="checksum"):
        decode(FRAMES[name] + b"\0")


def test_an_announced_length_allocates_nothing_before_it_is_checked() -> None:
    frame = bytearray(BODIES["Candidate"])
    frame[72:76] = struct.pack("<I", MAX_TOKENS)
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(seal(bytes(frame)))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_an_oversized_frame_is_refused() -> None:
    with pytest.raises(WireError, match="are allowed"):
        decode(bytes(MAX_FRAME_BYTES + 1))


def test_the_longest_open_fits_a_frame() -> None:
    for num_reference in (0, MAX_TOKENS // 3):  # prompt and answer together are at most as long
        prompt, answer = (2**31 - 1,) * (MAX_TOKENS - num_reference), (2**31 - 1,) * num_reference
        numbers = tuple(range(MAX_NUM_SEQS + 1))
        message = Open(1, 1, prompt, MAX_TOKENS, "x" * MAX_TEXT_BYTES, 1, 1, answer, not_over=numbers)
        assert decode(encode(message, 0)).message == message


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (-65, struct.pack("<d", -1.0), "temperature=-1.0: expected a number from 0"),
        (-65, struct.pack("<d", float("nan")), "temperature=nan: expected a number from 0"),
        (-1, b"\x09", "9 stands for none of"),
        (-101, struct.pack("<I", 1), "1 biases announced, 65 bytes left"),
    ],
)
def test_a_distribution_that_no_user_could_ask_for_is_refused(offset: int, value: bytes, reason: str) -> None:
    frame = bytearray(encode(Open(7, 1, (), 9, "", 4, 2, (6,)), NONCE)[:-4])
    frame[len(frame) + offset : len(frame) + offset + len(value)] = value
    with pytest.raises(WireError, match=reason):
        decode(seal(bytes(frame)))


@pytest.mark.parametrize(
    "message",
    [
        Verdict(-1, 0, 0, 0, (), 0),
        Verdict(0, 0, 0, 0, (2**31,), 0),
        Verdict(0, 0, 0, 0, (0,) * (MAX_TOKENS + 1), 0),
        Verdict(0, 0, 0, 0, (0.5,), 0),  # type: ignore[arg-type]  # the mistake under test
        Verdict(None, 0, 0, 0, (), 0),  # type: ignore[arg-type]  # the mistake under test
        Candidate(0, 0, 0, 0, 0, 0, (), (), (), more=2),  # type: ignore[arg-type]  # the mistake under test
        Close(0, FinishReason.EOS, (0,) * (MAX_NUM_SEQS + 2)),
        Close(0, "tired"),  # type: ignore[arg-type]  # the mistake under test
        Failed(Role.DRAFT, "E", "x" * (MAX_TEXT_BYTES + 1)),
        Failed(Role.DRAFT, "E", "\ud800"),
        Hello(1, Role.DRAFT, 1, 10, "", ("x" * MAX_TEXT_BYTES,) * (MAX_NAMES // 2)),
    ],
)
def test_a_message_that_does_not_fit_is_refused_by_the_sender(message: Message) -> None:
    with pytest.raises(ValueError, match=f"{type(message).__name__} (does not fit|of)"):
        encode(message, NONCE)


def test_a_nonce_beyond_64_bits_and_what_is_no_message_are_refused_by_the_sender() -> None:
    for nonce in (-1, 2**64):
        with pytest.raises(ValueError, match="does not fit"):
            encode(Shutdown(), nonce)
    with pytest.raises(ValueError, match="not a message"):
        encode("Shutdown", NONCE)  # type: ignore[arg-type]  # the mistake under test
