"""Measures the target's passes, makes the policy's view, and decides whether to draft at all."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from amusd.policies.base import TargetView, Verify
from amusd.policies.estimates import MEMORY, Estimates, RowCost, RunningRatio, without_stall
from amusd.protocol.target_session import TargetSession
from amusd.protocol.verification import PassOutcome

FIRST_DRAFTING = 32
"""Passes before the first pause; doubled after a pause that did not pay."""
LATER_DRAFTING = 16
"""Passes between a pause that paid and the next one."""
FIRST_PAUSE = 6
"""Passes of the first pause; four times as many after a pause that paid."""
LONGEST = 1024
"""Most passes between pauses, and of a pause."""
CLEAR_YIELD = 2.0
"""Tokens that drafting must yield in the time of the quickest pass to avoid the first pause."""
YIELD_MEMORY = 0.98
"""Weight of the past in the yields of drafting and of plain decoding, per pass."""


class DraftingSwitch:
    """Decides whether to draft at all, by trying both; for one drafter and all sequences of a pass.

    Drafting shares memory, power or a host with the target and widens passes, which costs time if the draft is hardly
    ever right. In a pause the target decodes alone and sends no verdicts.

    A short first pause comes early, unless drafting yields `CLEAR_YIELD` tokens per quickest pass. Later ones come if
    drafting yields less than plain decoding did, or than one token per quickest pass. Each pause ends: text changes.
    """

    def __init__(self) -> None:
        self._drafting, self._plain = RunningRatio(YIELD_MEMORY), RunningRatio(YIELD_MEMORY)
        self.drafting_pays = True
        self._num_passes = 0.0
        self._drafting_passes, self._pause_passes = FIRST_DRAFTING, FIRST_PAUSE
        self._quickest_rate = 0.0
        """Passes per second, if all took as long as the quickest."""

    @property
    def plain_tokens_per_second(self) -> float:
        """The yield of past pauses; before any, one token per quickest pass."""
        return self._plain.value or self._quickest_rate

    def on_pass(
        self, num_tokens: int, seconds: float, pass_seconds: float, share: float = 1.0, *, is_plain: bool
    ) -> None:
        """Take in a pass that ended `seconds` after the previous one; `share`: one sequence's share of the pass.

        `is_plain`: it was made in a pause.
        """
        if pass_seconds:  # 0 on a coarse clock
            self._quickest_rate = max(self._quickest_rate, 1 / pass_seconds)
        self._num_passes += share
        (self._plain if is_plain else self._drafting).add(num_tokens, seconds, share)
        if round(self._num_passes, 3) >= (self._drafting_passes if self.drafting_pays else self._pause_passes):
            self._num_passes = 0.0
            self._judge_drafting() if self.drafting_pays else self._judge_pause()

    def _judge_drafting(self) -> None:
        quickest, plain = self._quickest_rate, self._plain.value
        bar = max(plain, quickest) if plain else CLEAR_YIELD * quickest
        self.drafting_pays = self._drafting.value >= bar

    def _judge_pause(self) -> None:
        self.drafting_pays = True
        if self._plain.value > self._drafting.value:
            self._drafting_passes = LATER_DRAFTING
            self._pause_passes = min(4 * self._pause_passes, LONGEST)
        else:
            self._drafting_passes = min(2 * max(self._drafting_passes, FIRST_DRAFTING), LONGEST)
            self._pause_passes = FIRST_PAUSE


NEARLY = 0.9
"""A wait of this share of the longest wait was in vain, since clocks are not exact."""

UsedDrafter: TypeAlias = tuple[str | None, bool]
"""A drafter's name, and whether it drafts trees."""
Switches: TypeAlias = dict[tuple[UsedDrafter, int], DraftingSwitch]
"""Switches by drafter and by the bit length of the number of sequences in a pass."""


class PassTimes(NamedTuple):
    """A pass, in nanoseconds of one clock."""

    start_ns: int
    end_ns: int
    num_rows: int
    """Rows of all sequences, since a row delays all of them."""
    num_sequences: int = 1

    @property
    def duration_ns(self) -> int:
        """Duration of the pass."""
        return self.end_ns - self.start_ns


class Observer:
    """Watches one sequence after another. Times in nanoseconds of one clock.

    Sequences share `switches`: if one alone paused, its passes would still hold others' candidates.
    """

    def __init__(self, switches: Switches | None = None) -> None:
        self._pass_seconds = self._seconds = 0.0
        """Usual duration of a pass, and usual time from one pass's end to the next's."""
        self._row_cost, self._num_sequences = RowCost(), 1
        self._estimates_of: dict[UsedDrafter, Estimates] = {}
        self._switches = {} if switches is None else switches
        self.open(None, has_tree=False)

    def open(self, drafter: str | None, *, has_tree: bool) -> None:
        """Begin an answer. A drafter's estimates with and without trees are apart."""
        self._drafter: UsedDrafter = drafter, has_tree
        self._estimates = self._estimates_of.setdefault(self._drafter, Estimates())
        self._last_end_ns: int | None = None
        self._waited, self._waited_at = 0.0, 0
        """Seconds waited without a new candidate, and the number of candidates at hand."""
        self._verdict_sent = True
        self._vain_at: int | None = None
        """Number of candidates after a vain wait: no wait until there are more. None: waits are allowed."""

    @property
    def _switch(self) -> DraftingSwitch:
        return self._switches.setdefault((self._drafter, self._num_sequences.bit_length()), DraftingSwitch())

    def on_draft_joined(self) -> None:
        """Wait no more until a candidate comes: the draft must first take in the whole answer."""
        self._vain_at = 0

    def exclude(self, ns: int) -> None:
        """Leave out some of the time between two passes: another sequence's prompt, or a reader's pause."""
        if self._last_end_ns is not None:
            self._last_end_ns += ns

    def view(self, session: TargetSession, *, max_candidates: int, waited_ns: int) -> TargetView:
        """The view for the policy. `max_candidates`: of the next pass; `waited_ns`: since that pass could begin."""
        weights, num_candidates = session.weights, session.num_candidates
        waits = self._estimates.waits(num_candidates)
        return TargetView(
            num_candidates=num_candidates,
            max_candidates=max_candidates,
            may_get_more=session.may_get_more and self._verdict_sent,
            draft_restarting=session.draft_restarting,
            waited_seconds=waited_ns / 1e9,
            pass_seconds=self._pass_seconds,
            weights=weights,
            chances=self._estimates.chances(num_candidates, weights),
            acceptance=self._estimates.acceptance.value,
            tokens_per_second=self._estimates.tokens_per_second.value,
            candidate_seconds=waits.candidate_seconds,
            longest_wait=waits.longest_seconds,
            waited_in_vain=self._vain_at is not None and num_candidates <= self._vain_at,
            lead_gain=self._estimates.lead_gain,
            row_seconds=self._row_cost.row_ns * self._num_sequences / 1e9,
            drafting_pays=self._switch.drafting_pays,
            plain_tokens_per_second=self._switch.plain_tokens_per_second,
        )

    def on_wait(self, ns: int, allowed_seconds: float, *, num_before: int, num_after: int) -> None:
        """Take in a wait for a message, with the candidates at hand before and after it."""
        came, seconds = num_after > num_before, ns / 1e9
        waits = self._estimates.waits(num_before)
        if not came and seconds >= NEARLY * allowed_seconds:  # a shorter wait was ended by another message
            self._vain_at = num_after
        self._waited, self._waited_at = self._waited + seconds, num_before
        if came:
            waits.on_wait(self._waited, came=True)
            self._waited = 0.0

    def on_step(self, step_ns: int) -> None:
        """Take in the duration of the draft's last step; 0: unknown."""
        if step_ns:
            self._estimates.on_step(step_ns / 1e9)

    def on_pass(
        self, view: TargetView, decision: Verify, times: PassTimes, outcome: PassOutcome, *, has_draft: bool
    ) -> None:
        """Take in a pass, with the view and the decision that led to it.

        `has_draft`: a draft that is not silent works on the sequence.
        """
        self._verdict_sent, self._num_sequences = decision.sends_verdict, times.num_sequences
        if self._waited:
            self._estimates.waits(self._waited_at).on_wait(self._waited, came=False)
            self._waited = 0.0
        self._vain_at = 0 if view.waited_in_vain else None
        pass_seconds = without_stall(times.duration_ns / 1e9, self._pass_seconds)
        last_end_ns = times.start_ns if self._last_end_ns is None else self._last_end_ns
        seconds = without_stall((times.end_ns - last_end_ns) / 1e9, self._seconds)
        self._last_end_ns = times.end_ns
        self._pass_seconds = MEMORY * (self._pass_seconds or pass_seconds) + (1 - MEMORY) * pass_seconds
        self._seconds = MEMORY * (self._seconds or seconds) + (1 - MEMORY) * seconds
        self._row_cost.add(times.num_rows, times.duration_ns)
        if decision.sends_verdict:
            self._estimates.on_pass(outcome, seconds, view)
        if has_draft:
            share = 1 / times.num_sequences
            self._switch.on_pass(outcome.num_tokens, seconds, pass_seconds, share, is_plain=not decision.sends_verdict)
