"""What a draft says, and when, on a clock that only its own work moves."""

from __future__ import annotations

import itertools

from runtime.clocked import Clock, Link

from amusd.drafters.base import one_by_one
from amusd.drafters.oracle import OracleDrafter, always_right
from amusd.protocol.messages import Candidate, Close, Message, Open, Progress, Shutdown, Verdict
from amusd.runtime.draft_worker import IDLE_SECONDS, SIGN_NS, DraftWorker
from amusd.tracing.recorder import Recorder
from amusd.types import FinishReason

PROMPT = (3, 1, 4)
ANSWER = tuple(range(10, 30))


class SlowDrafter(OracleDrafter):
    """Knows the answer; a step takes `seconds` and makes one token, however many are wanted."""

    clock: Clock
    seconds = 0.0

    def propose(self, max_tokens: int) -> tuple[int, ...]:
        self.clock.pass_by(self.seconds)
        return super().propose(min(1, max_tokens))


class Draft:
    """A worker at a link of the test's, which has opened one sequence."""

    def __init__(self, *, step_seconds: float = 0.01, max_length: int = 23, **opening: int) -> None:
        self.clock = Clock()
        self.link = Link(self.clock)

        def make() -> SlowDrafter:
            drafter = SlowDrafter((*PROMPT, *ANSWER), always_right(), 50)
            drafter.clock, drafter.seconds = self.clock, step_seconds
            return drafter

        recorder = Recorder("draft", now_ns=self.clock)
        self.worker = DraftWorker(self.link, {"test": one_by_one(make)}, {}, 1, recorder)  # type: ignore[arg-type]
        self.worker.prepare()
        options = {"max_lookahead": 8, "tokens_per_message": 1} | opening
        self.say(Open(1, 1, PROMPT, max_length, "test", **options))

    def say(self, *messages: Message) -> None:
        """Have the draft hear this, and do one step."""
        self.link.inbox += messages
        self.worker.step()

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.worker.step()


def test_candidates_are_the_answer_as_far_as_the_draft_may_run_ahead() -> None:
    draft = Draft(max_lookahead=5)
    draft.steps(8)
    candidates = draft.link.messages(Candidate)
    assert tuple(token for candidate in candidates for token in candidate.token_ids) == ANSWER[:5]
    assert [candidate.more for candidate in candidates] == [True] * 4 + [False]


def test_long_work_on_one_message_is_no_silence() -> None:
    draft = Draft(step_seconds=0.06, max_lookahead=8, tokens_per_message=8)
    while not draft.link.messages(Candidate):
        draft.worker.step()
    said = [0.0, *(at for at, _ in draft.link.sent)]
    assert max(later - earlier for earlier, later in itertools.pairwise(said)) <= SIGN_NS / 1e9 + 0.06
    assert len(draft.link.messages(Progress)) == 3  # then come the candidates


def test_a_verdict_that_leaves_no_room_is_answered_at_once() -> None:
    """Else the target would wait for candidates that never come."""
    draft = Draft(max_length=len(PROMPT) + 4, max_lookahead=2)
    draft.steps(2)
    said = len(draft.link.messages(Candidate))
    draft.say(Verdict(1, 1, 0, len(PROMPT), (ANSWER[0], ANSWER[1], ANSWER[2]), 2))
    last = draft.link.messages(Candidate)[said:]
    assert last
    assert not last[-1].more


def test_only_the_newest_of_several_verdicts_is_followed() -> None:
    draft = Draft(max_lookahead=8)
    draft.steps(3)
    older = Verdict(1, 1, 0, len(PROMPT), ANSWER[:1], 1)
    newer = Verdict(1, 1, 0, len(PROMPT), ANSWER[:3], 3)
    draft.say(older, newer)
    sequence = draft.worker._sequences[1]
    assert sequence.manager.session.committed == (*PROMPT, *ANSWER[:3])
    assert (sequence.num_rollbacks, draft.worker.num_ignored) == (0, 0)


def test_an_impossible_verdict_is_counted_once_and_changes_nothing() -> None:
    draft = Draft(max_lookahead=8)
    draft.steps(3)
    draft.say(Verdict(1, 1, 0, 99, (7,), 0))
    draft.steps(2)
    sequence = draft.worker._sequences[1]
    assert sequence.manager.session.committed == PROMPT
    assert draft.worker.num_ignored == 1


def test_waiting_is_counted_and_working_is_not() -> None:
    draft = Draft(step_seconds=0.01, max_lookahead=2)
    draft.steps(1)
    draft.steps(2)  # nothing to do: two waits
    draft.say(Close(1, FinishReason.EOS), Shutdown())
    progress = draft.link.messages(Progress)[-1]
    assert progress.wait_ns == 2 * IDLE_SECONDS * 1e9
    assert progress.busy_ns == 2 * 0.01 * 1e9
    assert (progress.num_steps, progress.num_drafted) == (2, 2)
