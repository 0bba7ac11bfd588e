"""The closed vocabulary of messages between draft and target. Values only: frozen, no behaviour.

Positions are absolute: position 0 is the first prompt token. Intervals are half-open. The type of a field says which
values fit a frame (`wire.py`); `docs/protocol.md` says what each message promises. Changing a message means raising
`PROTOCOL_VERSION`.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from amusd.config import GREEDY, MAX_NUM_SEQS, Distribution
from amusd.types import FinishReason, Role

PROTOCOL_VERSION = 9

MAX_TOKENS = 1 << 20
"""Token ids in one message at most."""
MAX_TEXT_LENGTH = 1 << 16
"""Characters of one text at most."""
MAX_NAMES = 256
"""Names in one message at most."""
MAX_ROWS = 1 << 12
"""Rows of probabilities in one message at most."""
MAX_ROW_BYTES = 1 << 15
"""Bytes of one such row at most."""
MAX_FEATURE_BYTES = 1 << 20
"""Bytes of features in one message at most."""
MAX_EPOCH = 1 << 32
"""Far more losses than a sequence has; and what follows an epoch always fits a frame."""
CERTAINTY = 1 << 16
"""The weight of a candidate that the draft is sure of."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A position, an identifier or a counter."""
Unsigned64: TypeAlias = Annotated[int, Meta(ge=0)]
"""Any number of 64 bits, which is what MessagePack holds."""
Ids: TypeAlias = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], ...], Meta(max_length=MAX_TOKENS)]
"""A number below 2^31 for each of many tokens."""
SequenceIds: TypeAlias = Annotated[tuple[Unsigned64, ...], Meta(max_length=MAX_NUM_SEQS + 1)]
"""Numbers of sequences, which may be above those of tokens."""
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT_LENGTH)]
Names: TypeAlias = Annotated[tuple[Text, ...], Meta(max_length=MAX_NAMES)]
Rows: TypeAlias = Annotated[tuple[Annotated[bytes, Meta(max_length=MAX_ROW_BYTES)], ...], Meta(max_length=MAX_ROWS)]
FeatureBytes: TypeAlias = Annotated[bytes, Meta(max_length=MAX_FEATURE_BYTES)]


class _Message(Struct, frozen=True, array_like=True, gc=False):
    """In a frame: a list of its tag and its fields, in their order."""


class Hello(_Message, frozen=True, tag=1):
    """Both ways, first on every link: refuse early, with a reason, what cannot work together."""

    protocol_version: Count
    """`PROTOCOL_VERSION` of the sender."""
    role: Role
    """Which side the sender is."""
    incarnation: Count
    """Which life of the draft process this is (1 for the first); the target sends 0."""
    vocab_size: Count
    """Ids are in `[0, vocab_size)`; 0 from a drafter without a model. For information: padded vocabularies differ."""
    tokenizer_hash: Text
    """Fingerprint (hex) of the tokenizer whose ids it speaks, compared between the peers; empty: it works with any."""
    drafters: Names
    """Names an `Open` may ask for; empty from the target."""
    tree_drafters: Names = ()
    """Names that an `Open` with a `fan_out` above 1 may ask for; empty from the target."""


class Open(_Message, frozen=True, tag=2):
    """Target -> draft: prefill these tokens and draft on."""

    sequence_id: Count
    """Names the sequence in every later message; higher than that of any sequence that began before."""
    incarnation: Count
    """The draft's life this is addressed to."""
    token_ids: Ids
    """Everything committed so far: the prompt, and more when a draft joins late."""
    max_length: Count
    """Committed length never exceeds this many tokens, prompt included."""
    drafter: Text
    """Which drafter proposes."""
    max_lookahead: Count
    """How many tokens the draft may be ahead of the committed prefix it knows."""
    tokens_per_message: Count
    """Candidates are sent once this many are ready, or when nothing more can follow."""
    reference: Ids = ()
    """Tokens that the target is going to commit behind `token_ids`, for a synthetic drafter; empty for all others."""
    distribution: Distribution = GREEDY
    """Distribution of the target's tokens. The draft uses it with its own logits, to guess right."""
    fan_out: Count = 1
    """How many candidates a draft step makes behind a token at most; 1: the tree is a chain."""
    rows_per_step: Count = 1
    """Nodes of the tree that one draft step computes at most; 1 of a chain."""
    max_steps: Count = 0
    """Steps that the draft takes behind one committed prefix at most; 0: no limit."""
    not_over: SequenceIds = ()
    """Numbers of all open sequences and of the next one to begin; every other number below that one is over."""


class Candidate(_Message, frozen=True, tag=3):
    """Draft -> target: tokens that may follow what is committed. May be empty, to say only `more=False`.

    They are nodes of a tree, numbered `[first, first + len(token_ids))`; a number is given once in a draft's life.
    """

    sequence_id: Count
    incarnation: Count
    """The draft's life that drafted them."""
    base: Count
    """Committed length that the draft knew when it sent this, and that parent 0 stands for."""
    prefix_hash: Unsigned64
    """64-bit rolling hash of the first `base` tokens (`prefix_hash.py`)."""
    first: Count
    """Number of the first node, from 1."""
    parents: Ids
    """Number of the node that each follows; 0: it follows the first `base` tokens."""
    token_ids: Ids
    """The candidate at each node."""
    weights: Ids
    """How likely the draft takes each to be the target's token behind its parent, in parts of `CERTAINTY`; a chain has
    none."""
    more: bool
    """False: nothing further follows until the draft hears a verdict beyond `base`."""
    draft_probs: Rows = ()
    """The distribution that each token was drawn from, under the ratio test; packed as in `sampling/acceptance.py`."""


class Verdict(_Message, frozen=True, tag=4):
    """Target -> draft: cumulative; the newest one alone brings the draft up to date, also after a lost one."""

    sequence_id: Count
    incarnation: Count
    """The draft's life this is addressed to."""
    epoch: Count
    """How often candidates were lost on the way: a draft that learns of a new epoch offers its tree again."""
    start: Count
    """Position of the first token of `token_ids`: the base that the draft last showed it knows."""
    token_ids: Ids
    """Tokens committed at `[start, start + len(token_ids))`; the end is the committed length."""
    num_accepted: Count
    """Candidates accepted by the verification that produced this verdict."""


class Features(_Message, frozen=True, tag=9):
    """Target -> draft: what the drafter reads of the target's hidden states of committed tokens.

    Sent before the verdict that commits the tokens, each position once for each `Open`. Their loss costs speed, never a
    token.
    """

    sequence_id: Count
    incarnation: Count
    """The draft's life this is addressed to."""
    start: Count
    """Position of the first row."""
    end: Count
    """Position behind the last one."""
    rows: FeatureBytes
    """[end - start, width] bfloat16, little-endian, row by row."""


class Close(_Message, frozen=True, tag=5):
    """Target -> draft: forget the sequence. Answered by its final `Progress`."""

    sequence_id: Count
    reason: FinishReason
    not_over: SequenceIds = ()
    """As in `Open`."""


class Progress(_Message, frozen=True, tag=6):
    """Counts of a sequence since its `Open`. The last one answers `Close`; others tell of long work."""

    role: Role
    sequence_id: Count
    num_steps: Count
    """Calls of the drafter that proposed."""
    num_drafted: Count
    """Tokens drafted, offered or not."""
    num_rollbacks: Count
    """Times that drafted tokens were thrown away."""
    num_stale: Count
    """Verdicts ignored as stale."""
    busy_ns: Count
    """Nanoseconds in prefill, proposing and rolling back."""
    wait_ns: Count
    """Nanoseconds of waiting for a message because nothing could be drafted."""
    open_ns: Count
    """Nanoseconds from `Open` to this message; 0: the draft has refused the sequence, or a verdict for it."""


class Failed(_Message, frozen=True, tag=7):
    """Either way: the sender cannot go on. Never swallowed."""

    role: Role
    kind: Text
    """Name of the error class."""
    text: Text
    """What went wrong, in a line."""


class Shutdown(_Message, frozen=True, tag=8):
    """Target -> draft: the session is over, end the process."""


Message: TypeAlias = Hello | Open | Candidate | Verdict | Close | Progress | Failed | Shutdown | Features
