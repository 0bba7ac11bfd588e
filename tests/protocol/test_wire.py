"""Every message survives the wire; no bytes make `decode` raise anything but `PeerProtocolError`, or name a version."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import EXAMPLES, messages, nonces

from amusd.errors import ConfigError, PeerProtocolError
from amusd.protocol import messages as m
from amusd.protocol.wire import MAX_FRAME_BYTES, decode, encode

NONCE = 0x0123456789ABCDEF
FRAMES = {type(message).__name__: encode(message, NONCE) for message in EXAMPLES}
BODIES = {name: frame[:-4] for name, frame in FRAMES.items()}
HEADER = "414d5344 0e00 efcdab8967452301 1500000000000000"
GOLDEN = {
    m.Candidate(7, 1, 300, 2**64 - 1, 4, (0, 4), (5, 70_000), (), more=True, step_ns=3000): HEADER
    + "9c 03 07 01 cd012c cfffffffffffffffff 04 920004 9205ce00011170 90 c3 90 cd0bb8",
    m.Verdict(7, 1, 3, 9, (5, 200)): HEADER + "96 04 07 01 03 09 9205ccc8",
    m.DraftHello(1, "ab", ("a", "bc"), ("bc",), 9): HEADER + "96 0a 01 a26162 92a161a26263 91a26263 09",
}
"""Frames of this version, before they are sealed. A change here is a change of PROTOCOL_VERSION."""
COUNT, ID, TEXT = 2**63 - 1, 2**31 - 1, "\N{GRINNING FACE}" * m.MAX_TEXT_LENGTH
LARGEST = (
    m.Open(COUNT, COUNT, (ID,) * m.MAX_TOKENS, m.MAX_TOKENS, TEXT, 1, 1, not_over=(2**64 - 1,) * (m.MAX_NUM_SEQS + 1)),
    m.Verdict(COUNT, COUNT, COUNT, COUNT, (ID,) * m.MAX_TOKENS),
    m.Candidate(
        1, 1, 1, 1, 1, (), (), (), True, draft_probs=(bytes(m.MAX_DRAFT_PROBS_BYTES), *(b"",) * (m.MAX_DRAFT_PROBS - 1))
    ),
    m.DraftHello(1, TEXT, ("n",) * m.MAX_NAMES, ("n",) * m.MAX_NAMES, COUNT),
    m.Failed(TEXT, TEXT),
    m.Features(1, 1, 0, 1, bytes(m.MAX_FEATURE_BYTES)),
)
MISTAKES: dict[str, Any] = {
    "a negative number": m.Verdict(-1, 0, 0, 0, ()),
    "a hash beyond 64 bits": m.Candidate(0, 0, 0, 2**64, 0, (), (), (), more=True),
    "a token id of 32 bits": m.Verdict(0, 0, 0, 0, (2**31,)),
    "half a token": m.Verdict(0, 0, 0, 0, (0.5,)),  # type: ignore[arg-type]
    "a number for a truth": m.Candidate(0, 0, 0, 0, 0, (), (), (), more=2),  # type: ignore[arg-type]
    "a lone surrogate": m.Failed("E", "\ud800"),
    "a text": "Shutdown",
    "too many tokens": m.Verdict(0, 0, 0, 0, (0,) * (m.MAX_TOKENS + 1)),
    "too long a text": m.Failed("E", "x" * (m.MAX_TEXT_LENGTH + 1)),
    "too long a frame": m.DraftHello(1, "", (TEXT,) * m.MAX_NAMES, (), 1),
}


def with_a_bit_flipped(frame: bytes) -> Iterator[bytes]:
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


def seal(frame: bytes) -> bytes:
    return frame + zlib.crc32(frame).to_bytes(4, "little")


def with_body(body: bytes) -> bytes:
    return seal(BODIES["Shutdown"][:22] + body)


def decodes_or_refuses(frame: bytes) -> None:
    try:
        nonce, sent_ns, message = decode(frame)
    except PeerProtocolError:
        return
    assert encode(message, nonce, sent_ns) == frame


@given(message=messages, nonce=nonces, sent_ns=nonces)
def test_every_message_comes_back_equal_with_its_header(message: m.Message, nonce: int, sent_ns: int) -> None:
    assert decode(encode(message, nonce, sent_ns)) == (nonce, sent_ns, message)


@pytest.mark.parametrize("message", LARGEST, ids=lambda message: type(message).__name__)
def test_the_longest_message_of_each_kind_fits_a_frame(message: m.Message) -> None:
    assert decode(encode(message, 0))[2] == message


@pytest.mark.parametrize("message", GOLDEN, ids=lambda message: type(message).__name__)
def test_the_layout_of_this_version_does_not_change(message: m.Message) -> None:
    assert encode(message, NONCE, 0x15) == seal(bytes.fromhex(GOLDEN[message]))


@settings(max_examples=300)
@given(frame=st.binary(max_size=200), tag=st.integers(0, 14), body=st.binary(max_size=120))
def test_random_bytes_raise_only_wire_errors(frame: bytes, tag: int, body: bytes) -> None:
    with pytest.raises(PeerProtocolError):
        decode(frame)
    decodes_or_refuses(with_body(body))
    decodes_or_refuses(with_body(bytes((0x90 + len(body) % 16, tag)) + body))


@pytest.mark.parametrize("name", FRAMES)
def test_a_spoilt_frame_is_refused_or_is_the_frame_of_another_message(name: str) -> None:
    frame, body = FRAMES[name], BODIES[name]
    for damaged in (*with_a_bit_flipped(frame), *(frame[:length] for length in range(len(frame))), frame + b"\0"):
        with pytest.raises(PeerProtocolError):
            decode(damaged)
    for bit, spoilt in enumerate(with_a_bit_flipped(body)):
        if 32 <= bit < 48:
            with pytest.raises(ConfigError, match="install one amusd at both ends"):
                decode(seal(spoilt))
        else:
            decodes_or_refuses(seal(spoilt))
    for cut in (*(body[:length] for length in range(len(body))), body + b"\0"):
        with pytest.raises(PeerProtocolError):
            decode(seal(cut))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("96 04 07 01 03 cc09 9205ccc8", "other bytes"),  # 9 in two bytes
        ("96 04 07 01 03 09 dc000205ccc8", "other bytes"),
        ("97 04 07 01 03 09 9205ccc8 c0", "other bytes"),  # one field too many
        ("96 04 07 01 03 cb4000000000000000 9205ccc8", "Expected `int`"),
        ("96 04 07 01 03 09 ddffffffff", "Expected `array` of length"),
        ("92 0d 00", "Invalid value 13"),
        ("91" * 100_000, "Expected `int`"),
        ("97 04 07 01 03 09 90" + "91" * 100_000 + "90", "recursion"),
    ],
)
def test_a_message_in_other_bytes_than_those_of_its_frame_is_refused(body: str, reason: str) -> None:
    with pytest.raises(PeerProtocolError, match=reason):
        decode(with_body(bytes.fromhex(body)))


def test_an_oversized_frame_is_refused() -> None:
    with pytest.raises(PeerProtocolError, match="are allowed"):
        decode(bytes(MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_message_that_does_not_fit_is_refused_by_the_sender(name: str) -> None:
    with pytest.raises(ValueError, match=r"(does not|at most \d+) fit a frame"):
        encode(MISTAKES[name], NONCE)
