"""The target's side of a sequence that a draft works on."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from amusd.protocol.candidate_tree import Reception
from amusd.protocol.messages import Candidate, Open, Progress
from amusd.protocol.target_session import TargetSession
from amusd.runtime.patience import DraftState


class ClientSequence:
    """A sequence's session, and its state at the present draft."""

    before: ClientSequence | None = None
    """An ended sequence whose keys and values may serve this one."""
    at_draft: DraftState | None = None
    """State of the sequence at the present draft; None: the draft does not know it."""
    has_lost_draft = False
    """True while the sequence's draft is lost and not replaced."""
    is_over = False
    """True once the sequence is closed and no counts are awaited."""

    def __init__(
        self,
        token_ids: Sequence[int],
        wish: Open,
        vocab_size: int,
        max_silence_seconds: float,
        *,
        wants_draft_probs: bool = False,
    ) -> None:
        """`token_ids`: the prompt, of ids in `[0, vocab_size)`.

        `wish`: an `Open` that `opening` completes; without a drafter's name the sequence wants no draft.
        `max_silence_seconds`: most seconds of waiting, in sum, for a silent draft.
        """
        self.wish, self.max_silence_seconds = wish, max_silence_seconds
        self.session = TargetSession(
            sequence_id=wish.sequence_id,
            prompt=token_ids,
            max_length=wish.max_length,
            vocab_size=vocab_size,
            fan_out=wish.fan_out,
            wants_draft_probs=wants_draft_probs,
        )

    @property
    def sequence_id(self) -> int:
        """The sequence's number in messages and events."""
        return self.wish.sequence_id

    def append(self, token_ids: Sequence[int]) -> None:
        """Commit tokens that another engine has chosen."""
        for token_id in token_ids:
            self.session.begin(0)
            self.session.commit((token_id,), 0)

    def opening(self, incarnation: int, not_over: tuple[int, ...]) -> Open:
        """The first message to a draft of this incarnation."""
        session, followed = self.session, self.followed(incarnation)
        return replace(
            self.wish,
            incarnation=incarnation,
            token_ids=session.committed,
            reference=self.wish.reference[session.committed_length - session.prompt_length :],
            not_over=not_over,
            follows=0 if followed is None else followed.sequence_id,
        )

    def followed(self, incarnation: int) -> ClientSequence | None:
        """The ended sequence whose drafter at the draft can go on with this sequence; None without one."""
        before = self.before
        if before is None or before.wish.drafter != self.wish.drafter:
            return None
        state = before.at_draft
        return before if state is not None and state.is_answered and state.incarnation == incarnation else None

    def num_held_features(self, incarnation: int) -> int:  # noqa: ARG002 - for sequences with features
        """Number of leading positions whose features a draft of this incarnation already holds."""
        return 0

    def receive(self, message: Candidate) -> Reception:
        """Take in the draft's candidates. Raises `PeerProtocolError` for impossible ones."""
        return self.session.receive(message)

    def receive_counts(self, counts: Progress) -> None:
        """Take in the draft's final counts."""

    def lose_draft(self) -> None:
        """Go on without the draft."""
        self.session.detach()
        self.at_draft, self.has_lost_draft = None, True

    def find_draft(self) -> None:
        """Go on with the next draft, which got the opening."""
        self.has_lost_draft = False
