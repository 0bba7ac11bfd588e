"""The closed vocabulary of messages between draft and target. Values only: frozen, slotted, no behaviour.

Positions are absolute: position 0 is the first prompt token. Intervals are half-open. `wire.py` turns a message into
bytes, field by field in the order and by the type that stand here; `docs/protocol.md` says what each one promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from amusd.config import GREEDY, Distribution
from amusd.types import FinishReason, Role

PROTOCOL_VERSION = 8

MAX_EPOCH = 1 << 32
"""Far more losses than a sequence has; and what follows an epoch always fits a frame."""
CERTAINTY = 1 << 16
"""The weight of a candidate that the draft is sure of."""

Unsigned64: TypeAlias = Annotated[int, "uint64"]
"""Any number of 64 bits; every other `int` of a message is below 2^63."""
SequenceIds: TypeAlias = tuple[Unsigned64, ...]
"""Numbers of sequences, which may be above those of tokens."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Both ways, first on every link: refuse early, with a reason, what cannot work together."""

    protocol_version: int
    """`PROTOCOL_VERSION` of the sender."""
    role: Role
    """Which side the sender is."""
    incarnation: int
    """Which life of the draft process this is (1 for the first); the target sends 0."""
    vocab_size: int
    """Ids are in `[0, vocab_size)`; 0 from a drafter without a model. For information: padded vocabularies differ."""
    tokenizer_hash: str
    """Fingerprint (hex) of the tokenizer whose ids it speaks, compared between the peers; empty: it works with any."""
    drafters: tuple[str, ...]
    """Names an `Open` may ask for; empty from the target."""
    tree_drafters: tuple[str, ...] = ()
    """Names that an `Open` with a `fan_out` above 1 may ask for; empty from the target."""


@dataclass(frozen=True, slots=True)
class Open:
    """Target -> draft: prefill these tokens and draft on."""

    sequence_id: int
    """Names the sequence in every later message; higher than that of any sequence that began before."""
    incarnation: int
    """The draft's life this is addressed to."""
    token_ids: tuple[int, ...]
    """Everything committed so far: the prompt, and more when a draft joins late."""
    max_length: int
    """Committed length never exceeds this many tokens, prompt included."""
    drafter: str
    """Which drafter proposes."""
    max_lookahead: int
    """How many tokens the draft may be ahead of the committed prefix it knows."""
    tokens_per_message: int
    """Candidates are sent once this many are ready, or when nothing more can follow."""
    reference: tuple[int, ...] = ()
    """Tokens that the target is going to commit behind `token_ids`, for a synthetic drafter; empty for all others."""
    distribution: Distribution = GREEDY
    """Distribution of the target's tokens. The draft uses it with its own logits, to guess right."""
    fan_out: int = 1
    """How many candidates a draft step makes behind a token at most; 1: the tree is a chain."""
    rows_per_step: int = 1
    """Nodes of the tree that one draft step computes at most; 1 of a chain."""
    max_steps: int = 0
    """Steps that the draft takes behind one committed prefix at most; 0: no limit."""
    not_over: SequenceIds = ()
    """Numbers of all open sequences and of the next one to begin; every other number below that one is over."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Draft -> target: tokens that may follow what is committed. May be empty, to say only `more=False`.

    They are nodes of a tree, numbered `[first, first + len(token_ids))`; a number is given once in a draft's life. A
    chain is a tree in which every node has at most one child.
    """

    sequence_id: int
    incarnation: int
    """The draft's life that drafted them."""
    base: int
    """Committed length that the draft knew when it sent this; tells the target how far the draft has got."""
    root: int
    """Committed length that parent 0 stands for; `base` at most."""
    prefix_hash: Unsigned64
    """64-bit rolling hash of all tokens before `root` (`prefix_hash.py`)."""
    first: int
    """Number of the first node, from 1."""
    parents: tuple[int, ...]
    """Number of the node that each follows; 0: it follows the first `root` tokens."""
    token_ids: tuple[int, ...]
    """The candidate at each node."""
    weights: tuple[int, ...]
    """How likely the draft takes each to be the target's token behind its parent, in parts of `CERTAINTY`; a chain has
    none."""
    more: bool
    """False: nothing further follows until the draft hears a verdict beyond `base`."""
    draft_probs: tuple[bytes, ...] = ()
    """The distribution that each token was drawn from, under the ratio test; packed as in `sampling/acceptance.py`."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Target -> draft: cumulative; the newest one alone brings the draft up to date, also after a lost one."""

    sequence_id: int
    incarnation: int
    """The draft's life this is addressed to."""
    epoch: int
    """How often candidates were lost on the way: a draft that learns of a new epoch offers its tree again."""
    start: int
    """Position of the first token of `token_ids`: the base that the draft last showed it knows."""
    token_ids: tuple[int, ...]
    """Tokens committed at `[start, start + len(token_ids))`; the end is the committed length."""
    num_accepted: int
    """Candidates accepted by the verification that produced this verdict."""


@dataclass(frozen=True, slots=True)
class Features:
    """Target -> draft: what the drafter reads of the target's hidden states of committed tokens.

    Sent before the verdict that commits the tokens, each position once for each `Open`. Their loss costs speed, never a
    token.
    """

    sequence_id: int
    incarnation: int
    """The draft's life this is addressed to."""
    start: int
    """Position of the first row."""
    end: int
    """Position behind the last one."""
    rows: bytes
    """[end - start, width] bfloat16, little-endian, row by row."""


@dataclass(frozen=True, slots=True)
class Close:
    """Target -> draft: forget the sequence. Answered by its final `Progress`."""

    sequence_id: int
    reason: FinishReason
    not_over: SequenceIds = ()
    """As in `Open`."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Counts of a sequence since its `Open`: proof that the model loop moves, and the draft's share of the metrics.

    The last one answers `Close`; others are sent where long steps leave nothing else to say for a while.
    """

    role: Role
    sequence_id: int
    num_steps: int
    """Calls of the drafter that proposed."""
    num_drafted: int
    """Tokens drafted, offered or not."""
    num_rollbacks: int
    """Times that drafted tokens were thrown away."""
    num_stale: int
    """Verdicts ignored as stale."""
    busy_ns: int
    """Nanoseconds in prefill, proposing and rolling back."""
    wait_ns: int
    """Nanoseconds of waiting for a message because nothing could be drafted."""
    open_ns: int
    """Nanoseconds from `Open` to this message; 0: the draft has refused the sequence, or a verdict for it."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Either way: the sender cannot go on. Never swallowed."""

    role: Role
    kind: str
    """Name of the error class."""
    text: str
    """What went wrong, in a line."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Target -> draft: the session is over, end the process."""


Message: TypeAlias = Hello | Open | Candidate | Verdict | Close | Progress | Failed | Shutdown | Features
