"""The messages between draft and target: frozen values without behaviour.

Positions count from the first prompt token; intervals are half-open. A field's type gives the values that fit a frame
(`wire.py`); `docs/protocol.md` gives the rules. Each change of a message raises `PROTOCOL_VERSION`.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

PROTOCOL_VERSION = 14

MAX_TOKENS = 1 << 20
MAX_NUM_SEQS = 1 << 12
MAX_FAN_OUT = 1 << 12
"""Most candidates after one token of a tree, and most nodes of one step."""
MAX_TEXT_LENGTH = 1 << 16
MAX_NAMES = 256
MAX_DRAFT_PROBS = 1 << 12
MAX_DRAFT_PROBS_BYTES = 1 << 15
"""Most bytes of the draft probs of one token."""
MAX_FEATURE_BYTES = 1 << 20
MAX_EPOCH = 1 << 32
"""Far more losses than a sequence has."""
CERTAINTY = 1 << 16
"""The weight of a certain candidate."""

Natural: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A position, an identifier or a counter."""
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Width: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_FAN_OUT)]
NumTokens: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Unsigned64: TypeAlias = Annotated[int, Meta(ge=0)]
Ids: TypeAlias = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], ...], Meta(max_length=MAX_TOKENS)]
"""Token ids, numbers of nodes or weights, each below 2^31."""
SequenceIds: TypeAlias = Annotated[tuple[Unsigned64, ...], Meta(max_length=MAX_NUM_SEQS + 1)]
WireText: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT_LENGTH)]
Names: TypeAlias = Annotated[tuple[WireText, ...], Meta(max_length=MAX_NAMES)]
DraftProbs: TypeAlias = Annotated[
    tuple[Annotated[bytes, Meta(max_length=MAX_DRAFT_PROBS_BYTES)], ...], Meta(max_length=MAX_DRAFT_PROBS)
]
FeatureBytes: TypeAlias = Annotated[bytes, Meta(max_length=MAX_FEATURE_BYTES)]


class _Message(Struct, frozen=True, array_like=True, gc=False):
    """In a frame: a list of its tag and its fields, in their order."""


class TargetHello(_Message, frozen=True, tag=1):
    """Target -> draft: the first message of a link. A pair that cannot work together is refused early."""

    incarnation: Positive
    """Number of the draft process, as counted by the target."""
    tokenizer_hash: WireText
    """Fingerprint (hex) of the target's tokenizer, which the peers compare."""
    events: WireText | None
    """Where a draft that the target started records events (`Recorder`); None: nowhere."""


class DraftHello(_Message, frozen=True, tag=10):
    """Draft -> target: the answer, once the draft can begin."""

    incarnation: Positive
    """Incarnation of the target's hello."""
    tokenizer_hash: WireText
    """Fingerprint of the draft's tokenizer; empty: any fits."""
    drafters: Names
    """Drafter names for `Open`."""
    chains: Names
    """Drafters that draft a chain, whatever `Open.fan_out` is."""
    pid: Natural
    """The draft's process id, on its machine."""


class Ready(_Message, frozen=True, tag=11):
    """Further rank of the target -> first rank: the sender's model part is loaded."""


class Sampling(Struct, frozen=True, gc=False):
    """The distribution of the target's tokens: the fields of `config.Distribution`, which checks them."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    acceptance: str = "auto"
    seed: int = 0


class Open(_Message, frozen=True, tag=2):
    """Target -> draft: prefill these tokens and draft on."""

    sequence_id: Natural
    """Names the sequence; higher than that of any earlier sequence."""
    incarnation: Natural
    """Number of the draft process that this is addressed to."""
    token_ids: Ids
    """All committed tokens: the prompt, and more when a draft joins late."""
    max_length: NumTokens
    """Greatest committed length, prompt included."""
    drafter: WireText
    """Name of the drafter that proposes."""
    max_lookahead: Positive
    """Tokens that the draft may be ahead of the prefix it knows."""
    tokens_per_message: Positive
    """Candidates are sent once this many are ready, or fill a message, or when nothing more can follow."""
    reference: Ids = ()
    """Tokens that the target will commit after `token_ids`, for a synthetic drafter; else empty."""
    sampling: Sampling = Sampling()
    """Parameters that the draft applies to its logits."""
    fan_out: Width = 1
    """Most candidates that a draft step makes after a token; 1: a chain."""
    rows_per_step: Width = 1
    """Most nodes that a draft step computes; 1 for a chain."""
    max_steps: Natural = 0
    """Most steps after one committed prefix; 0: no limit."""
    not_over: SequenceIds = ()
    """Numbers of the open sequences and the next; all other lower numbers are over."""
    follows: Natural = 0
    """The ended sequence whose keys, values and features may serve this one, as far as both begin alike; 0: none."""


class Candidate(_Message, frozen=True, tag=3):
    """Draft -> target: tokens that may follow the committed ones; may be empty, to say `more=False`.

    The tokens are nodes of a tree, numbered `[first, first + len(token_ids))`. In each sequence numbers begin with 1,
    and a draft process uses each once.
    """

    sequence_id: Natural
    incarnation: Natural
    """Number of the draft process that drafted these."""
    base: Natural
    """Committed length that the draft knew; parent 0 is this prefix."""
    prefix_hash: Unsigned64
    """64-bit rolling hash of the first `base` tokens (`prefix_hash.py`)."""
    first: Natural
    """Number of the first node, from 1."""
    parents: Ids
    """Number of each node's parent; 0: the first `base` tokens."""
    token_ids: Ids
    """The candidate at each node."""
    weights: Ids
    """Draft's probability of each node after its parent, times `CERTAINTY`; a chain has none."""
    more: bool
    """False: nothing follows until a verdict beyond `base` has come."""
    draft_probs: DraftProbs = ()
    """The distribution that each token was drawn from, under the ratio test; packed as in `sampling/acceptance.py`."""
    step_ns: Natural = 0
    """Nanoseconds of the draft's last step; 0: none yet."""


class Verdict(_Message, frozen=True, tag=4):
    """Target -> draft: cumulative; the newest alone brings the draft up to date."""

    sequence_id: Natural
    incarnation: Natural
    """Number of the draft process that this is addressed to."""
    epoch: Natural
    """How often candidates were lost; with each new epoch the draft offers its tree again."""
    start: Natural
    """Position of the first of `token_ids`: the draft's newest base that the target has seen."""
    token_ids: Ids
    """Committed tokens at `[start, start + len(token_ids))`, up to the committed length."""


class Features(_Message, frozen=True, tag=9):
    """Target -> draft: hidden states of committed tokens.

    Features come before the verdict on their tokens, each position once per `Open`. A loss costs speed, never a token.
    """

    sequence_id: Natural
    incarnation: Natural
    """Number of the draft process that this is addressed to."""
    start: Natural
    """Position of the first row."""
    end: Natural
    """Position after the last row."""
    rows: FeatureBytes
    """[end - start, width] bfloat16, little-endian, row by row."""


class Close(_Message, frozen=True, tag=5):
    """Target -> draft: forget the sequence; answered by its final `Progress`, or `Refused` for an unknown one."""

    sequence_id: Natural
    not_over: SequenceIds = ()
    """As in `Open`."""


class Progress(_Message, frozen=True, tag=6):
    """Counts of a sequence since its `Open`. The last one answers `Close`; others say that the draft works."""

    sequence_id: Natural
    num_drafted: Natural
    """Tokens drafted, offered or not."""
    num_rollbacks: Natural
    """Times that drafted tokens were discarded."""
    busy_ns: Natural
    """Nanoseconds in prefill, proposing and rolling back."""
    open_ns: Natural
    """Nanoseconds since `Open`."""


class Refused(_Message, frozen=True, tag=12):
    """Draft -> target: the draft cannot serve, or does not know, this sequence."""

    sequence_id: Natural


class Failed(_Message, frozen=True, tag=7):
    """Draft or further rank -> target: the sender cannot go on."""

    kind: WireText
    """Name of the error class."""
    text: WireText
    """The error in one line."""


class Shutdown(_Message, frozen=True, tag=8):
    """Target -> draft: the session is over."""


Hello: TypeAlias = TargetHello | DraftHello | Ready
Message: TypeAlias = Hello | Open | Candidate | Verdict | Close | Progress | Refused | Failed | Shutdown | Features
