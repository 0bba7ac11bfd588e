"""A sequence that a draft works on, as its target knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace
from typing_extensions import Self

from amusd.protocol.candidate_tree import Reception
from amusd.protocol.messages import Candidate, Open, Progress
from amusd.protocol.target_session import TargetSession
from amusd.runtime.patience import DraftState


@dataclass(kw_only=True, eq=False)
class DraftedSequence:
    """A sequence that a draft works on, as its target knows it."""

    session: TargetSession
    wish: Open | None
    """Its `Open` without tokens, incarnation, `not_over` and `follows`; None: it wants no draft."""
    max_silence_seconds: float
    """How long the draft may be waited for in all."""
    before: DraftedSequence | None = None
    """An ended sequence whose keys and values may serve this one."""
    at_draft: DraftState | None = None
    """What the present draft knows of it; None: nothing."""
    has_lost_draft: bool = False
    """A draft that worked on it is lost, and not replaced yet."""
    is_over: bool = False
    """Nothing follows, and the counts are complete."""

    @property
    def sequence_id(self) -> int:
        """Names it in messages and events."""
        return self.session.sequence_id

    @classmethod
    def behind(cls, token_ids: Sequence[int], wish: Open, vocab_size: int, max_silence_seconds: float) -> Self:
        """A sequence whose tokens another engine decides; they are ids in `[0, vocab_size)`."""
        number, length, fan_out = wish.sequence_id, wish.max_length, wish.fan_out
        session = TargetSession(
            sequence_id=number, prompt=token_ids, max_length=length, vocab_size=vocab_size, fan_out=fan_out
        )
        return cls(session=session, wish=wish, max_silence_seconds=max_silence_seconds)

    def append(self, token_ids: Sequence[int]) -> None:
        """Make tokens final without a pass here."""
        for token_id in token_ids:
            self.session.begin(0)
            self.session.commit((token_id,), 0)

    def opening(self, incarnation: int, not_over: tuple[int, ...]) -> Open:
        """The first message to a draft of this incarnation."""
        assert self.wish is not None
        session, followed = self.session, self.followed(incarnation)
        return replace(
            self.wish,
            incarnation=incarnation,
            token_ids=session.committed,
            reference=self.wish.reference[session.committed_length - session.prompt_length :],
            not_over=not_over,
            follows=0 if followed is None else followed.sequence_id,
        )

    def followed(self, incarnation: int) -> DraftedSequence | None:
        """The ended sequence whose drafter can go on with this one; None if the draft has no such drafter."""
        before = self.before
        if before is None or before.wish is None or self.wish is None or before.wish.drafter != self.wish.drafter:
            return None
        state = before.at_draft
        return before if state is not None and state.is_answered and state.incarnation == incarnation else None

    def num_held_features(self, incarnation: int) -> int:  # noqa: ARG002 - for sequences with features
        """Number of first positions whose features a draft of this incarnation holds before any are sent."""
        return 0

    def receive(self, message: Candidate) -> Reception:
        """Take in the draft's candidates. Raises `PeerProtocolError` for what no correct draft sends."""
        return self.session.receive(message)

    def receive_counts(self, counts: Progress) -> None:
        """Take in the draft's counts."""

    def lose_draft(self) -> None:
        """Go on without the draft."""
        self.session.detach()
        self.at_draft, self.has_lost_draft = None, True

    def find_draft(self) -> None:
        """Go on with the next draft, which has the opening."""
        self.has_lost_draft = False
