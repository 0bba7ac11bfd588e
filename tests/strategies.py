"""Hypothesis strategies shared by the suite: every message type with any fields that fit a frame."""

from __future__ import annotations

from typing import get_args, get_type_hints

from hypothesis import strategies as st

from amusd.protocol import messages as m

nonces = st.integers(0, 2**64 - 1)
_counts = st.integers(0, 2**63 - 1)
_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
_addends = st.floats(-1e6, 1e6)
_OF_TYPE: dict[object, st.SearchStrategy[object]] = {
    bool: st.booleans(),
    m.Natural: _counts,
    m.Positive: st.integers(1, 2**63 - 1),
    m.Width: st.integers(1, m.MAX_FAN_OUT),
    m.NumTokens: st.integers(1, m.MAX_TOKENS),
    m.Unsigned64: nonces,
    m.Ids: st.lists(st.integers(0, 2**31 - 1), max_size=40).map(tuple),
    m.SequenceIds: st.lists(nonces, max_size=5).map(tuple),
    m.WireText: _texts,
    m.WireText | None: st.none() | _texts,
    m.Names: st.lists(_texts, max_size=5).map(tuple),
    m.DraftProbs: st.lists(st.binary(max_size=40), max_size=3).map(tuple),
    m.FeatureBytes: st.binary(max_size=40),
    m.Sampling: st.builds(
        m.Sampling,
        *[st.floats(allow_nan=False), _counts, *[st.floats(allow_nan=False)] * 5],
        logit_bias=st.lists(st.tuples(st.integers(0, 2**31 - 1), _addends), max_size=4).map(tuple),
        seed=_counts,
    ),
}


def _of(kind: type[m.Message]) -> st.SearchStrategy[m.Message]:
    types = get_type_hints(kind, include_extras=True)
    return st.builds(kind, *(_OF_TYPE[types[name]] for name in kind.__struct_fields__))


messages: st.SearchStrategy[m.Message] = st.one_of(*map(_of, get_args(m.Message)))

EXAMPLES: tuple[m.Message, ...] = (
    m.TargetHello(1, "0f" * 32, "out/{run}/events"),
    m.DraftHello(1, "0f" * 32, ("embedded", "ngram", "ü"), (), 4711),
    m.Ready(),
    m.Open(7, 1, (1, 2**31 - 1), 2048, "x", 16, 1, (3, 4), m.Sampling(logit_bias=((3, -1.0),)), 3, 8, 6, (5, 7, 8)),
    m.Candidate(7, 1, 10, 2**64 - 1, 4, (0, 4, 4), (5, 6, 7), (60_000, 1), more=True, draft_probs=(b"row", b"")),
    m.Verdict(7, 1, 4, 10, (5, 6, 9)),
    m.Close(7, (5, 8)),
    m.Progress(7, 80, 3, 10**9, 2 * 10**9),
    m.Refused(7),
    m.Failed("ValueError", "Traceback ...\nValueError: no"),
    m.Shutdown(),
    m.Features(7, 1, 10, 12, bytes.fromhex("803f0040 0000c0bf")),
)
