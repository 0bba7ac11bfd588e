"""Hypothesis strategies shared by the suite: every message type with any fields that fit a frame."""

from __future__ import annotations

from hypothesis import strategies as st

from amusd.config import Distribution
from amusd.protocol import messages as m
from amusd.types import FinishReason, Role

counts = st.integers(0, 2**63 - 1)
"""Positions, identifiers and counters."""
nonces = st.integers(0, 2**64 - 1)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=40).map(tuple)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
"""What UTF-8 can hold: anything but lone surrogates."""
roles = st.sampled_from(Role)

hellos = st.builds(m.Hello, counts, roles, counts, counts, texts, st.lists(texts, max_size=5).map(tuple))
addends = st.floats(-1e6, 1e6)
distributions = st.builds(
    Distribution,
    temperature=st.just(0.0) | st.floats(1e-6, 1e6),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(1e-6, 1e6),
    presence_penalty=addends,
    frequency_penalty=addends,
    logit_bias=st.lists(st.tuples(st.integers(0, 2**31 - 1), addends), max_size=4).map(tuple),
    seed=counts,
)
numbers = st.lists(nonces, max_size=5).map(tuple)
opens = st.builds(
    m.Open,
    counts,
    counts,
    token_ids,
    counts,
    texts,
    counts,
    counts,
    token_ids,
    distributions,
    counts,
    counts,
    counts,
    numbers,
)
candidates = st.builds(
    m.Candidate,
    counts,
    counts,
    counts,
    nonces,
    counts,
    token_ids,
    token_ids,
    token_ids,
    st.booleans(),
    st.lists(st.binary(max_size=40), max_size=3).map(tuple),
)
verdicts = st.builds(m.Verdict, counts, counts, counts, counts, token_ids, counts)
closes = st.builds(m.Close, counts, st.sampled_from(FinishReason), numbers)
progresses = st.builds(m.Progress, roles, counts, counts, counts, counts, counts, counts, counts, counts)
failures = st.builds(m.Failed, roles, texts, texts)
shutdowns = st.builds(m.Shutdown)
features = st.builds(m.Features, counts, counts, counts, counts, st.binary(max_size=40))

messages: st.SearchStrategy[m.Message] = st.one_of(
    hellos, opens, candidates, verdicts, closes, progresses, failures, shutdowns, features
)
"""Any message."""

EXAMPLES: tuple[m.Message, ...] = (
    m.Hello(m.PROTOCOL_VERSION, Role.DRAFT, 1, 49152, "0f" * 32, ("embedded", "ngram", "ü")),
    m.Open(
        7,
        1,
        (1, 2, 2**31 - 1),
        2048,
        "synthetic",
        16,
        1,
        (3, 4),
        Distribution(temperature=0.7, logit_bias=((3, -1.0),)),
        3,
        8,
        6,
        (5, 7, 8),
    ),
    m.Candidate(7, 1, 10, 2**64 - 1, 4, (0, 4, 4), (5, 6, 7), (60_000, 1), more=True, draft_probs=(b"row", b"")),
    m.Verdict(7, 1, 4, 10, (5, 6, 9), 2),
    m.Close(7, FinishReason.EOS, (5, 8)),
    m.Progress(Role.DRAFT, 7, 40, 80, 3, 1, 10**9, 10**8, 2 * 10**9),
    m.Failed(Role.TARGET, "ValueError", "Traceback ...\nValueError: no"),
    m.Shutdown(),
    m.Features(7, 1, 10, 12, bytes.fromhex("803f0040 0000c0bf")),
)
"""One of each type, in the order of their kinds on the wire."""
